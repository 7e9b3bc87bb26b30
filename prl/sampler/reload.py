"""Whole tensors go to vLLM's own loader, which makes of them what its kernels need (quantised weights with their scales, say).

vLLM's layerwise reload builds a module anew beside the live one, has its loader fill it, processes it as at the first load and
copies the result into the parameters that are live, which keep their storage, so that captured graphs stay valid. It does that
for the modules named here alone. It runs inside the pause: in the meantime the module has no weights.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


class ReloadError(Exception):
    """vLLM's loader did not fill a module; says which. The model is of no use any more."""


def reload_modules(model: Any, config: ModelConfig, modules: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Load these modules of a model of vLLM's anew from all tensors, under the names of Hugging Face, that make them up.
    Raises ReloadError, or what vLLM raises; the model must not be used then, and not be loaded again."""
    found = {name: model.get_submodule(name) for name in modules}
    for module in found.values():
        initialize_layerwise_reload(module)
    model.load_weights(iter(tensors.items()))
    # Of a module that lacks something vLLM would keep the old weights, or what lay in memory, with a warning at best.
    lacking = [name for name, module in found.items() if get_layerwise_info(module).can_load()]
    if lacking:
        raise ReloadError(f"vLLM's loader has not loaded all of {', '.join(lacking[:5])} ({len(lacking)} modules in all)")
    for module in found.values():
        finalize_layerwise_reload(module, config)
