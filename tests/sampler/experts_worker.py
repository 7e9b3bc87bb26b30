"""Writes the weights of a mixture of experts into a real vLLM's model and compares its parameters with what vLLM's own loader
makes of the same weights. `python experts_worker.py FOLDER DTYPE` prints, as JSON, what it found."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PRL_ROLE": "sampler",  # for the plug-in
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from tiny_models import Weights, save, tiny_experts, weights_of
from vllm import LLM

from prl.sampler.experts import expert_weights
from prl.sampler.placement import place
from prl.weights.transport import spec_of


def bits_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data.clone().view(torch.uint8) for name, parameter in model.named_parameters()}


def read(model: torch.nn.Module, own: Weights) -> dict[str, Any]:
    """The experts' own views of what vLLM's loader has loaded, which is `own`."""
    wrong, names = [], []
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts.routed_experts
        weights = expert_weights("experts", experts)
        for part in ("gate", "up", "down"):
            for expert, live in enumerate(getattr(weights, part)):
                names.append(f"model.layers.{number}.mlp.experts.{expert}.{part}_proj.weight")
                if not torch.equal(live.reshape(own[names[-1]].shape), own[names[-1]]):
                    wrong.append(names[-1])
    kernel = type(experts.quant_method.moe_kernel.fused_experts).__name__
    return {"kernel": kernel, "tensors": len(names), "wrong": wrong}


def write(model: torch.nn.Module, own: Weights, other: Weights) -> dict[str, Any]:
    """Which of the live parameters differ from what the loader has made of `own`, once others are written and once the same."""
    loaded = bits_of(model)
    placements = place(model, False, [spec_of(name, tensor) for name, tensor in own.items()])

    def differ(weights: Weights) -> list[str]:
        for placement in placements:
            placement.live.copy_(placement.of(weights[placement.spec.name]))
        return sorted(name for name, bits in bits_of(model).items() if not torch.equal(bits, loaded[name]))

    others, same = differ(other), differ(own)
    return {"parameters": sorted(loaded), "differ with others": others, "differ with the same": same}


def check(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    own, other = (tiny_experts(seed).to(dtype) for seed in (1, 2))
    save(own, folder)
    own.save_pretrained(folder)
    llm = LLM(str(folder), dtype=dtype, enforce_eager=True, kv_cache_memory_bytes=2**24, max_model_len=128)

    def look(model: torch.nn.Module) -> dict[str, Any]:
        found = read(model, weights_of(own))
        # In bfloat16 vLLM packs linear layers too, which are then refused.
        return found | (write(model, weights_of(own), weights_of(other)) if dtype is torch.float32 else {})

    return llm.apply_model(look)[0]


if __name__ == "__main__":
    name = sys.argv[2]
    print(json.dumps(check(Path(sys.argv[1]), getattr(torch, name))))
