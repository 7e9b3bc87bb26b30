"""What vLLM answers with quantised models that it has just loaded from files. `python quantized_worker.py FOLDER SEED...`
prints, as JSON, greedy answers with their log-probs by the seed."""

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
from tiny_models import save, tiny_model
from vllm import LLM, SamplingParams

PROMPT, TOKENS = [3, 1, 9, 4, 10], 40


def answer(folder: Path, seed: int) -> dict[str, Any]:
    model = tiny_model(seed).to(torch.bfloat16)
    save(model, folder)
    model.save_pretrained(folder)
    llm = LLM(
        str(folder),
        dtype="bfloat16",
        quantization="fp8_per_channel",
        enforce_eager=True,
        kv_cache_memory_bytes=2**24,
        max_model_len=128,
        logprobs_mode="processed_logprobs",
    )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0].outputs
    logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
    return {"token_ids": list(output.token_ids), "logprobs": logprobs}


if __name__ == "__main__":
    print(json.dumps({seed: answer(Path(sys.argv[1]) / seed, int(seed)) for seed in sys.argv[2:]}))
