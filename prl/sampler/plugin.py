"""vLLM's plug-in of the samplers; the entry point `vllm.general_plugins` of setup.cfg runs `register` in every vLLM process."""

import os

ENGINE = "prl"
TESTED = "==0.32.0"  # versions of vLLM, whose insides the samplers rely on; the same as in setup.cfg


def check_version(version: str) -> None:
    """Raises RuntimeError where the samplers were not tested with this version of vLLM."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        tested = Version(version) in SpecifierSet(TESTED)
    except InvalidVersion:  # "dev"
        tested = False
    if not tested:
        raise RuntimeError(
            f"vLLM {version} is installed, and prl's samplers were tested with vLLM {TESTED} alone: install that, by "
            f"`pip install '.[gpu]'` or, without a GPU, `bash tools/setup.sh`"
        )


def register() -> None:
    """Make our weight-transfer engine known to vLLM. Runs several times a process, and in every program of the environment
    that uses vLLM: only a sampler of a run is changed beyond that."""
    import torch
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    if ENGINE not in Factory._registry:
        Factory.register_engine(ENGINE, "prl.sampler.engine", "InPlaceEngine")
    if os.environ.get("PRL_ROLE") == "sampler" and not torch.cuda.is_available():
        _keep_linear_weights_live()


def _keep_linear_weights_live() -> None:
    """On CPUs vLLM replaces the weights of linear layers by a packed copy of oneDNN's, which new weights would never reach.
    Without oneDNN they stay parameters (in float32 equally fast). The flag is private, hence the check."""
    import vllm._custom_ops as ops

    if not hasattr(ops, "_supports_onednn"):
        raise RuntimeError(
            f"vllm._custom_ops has no _supports_onednn: this vLLM is not {TESTED}, and without that flag weight updates would "
            f"not reach linear layers on CPUs. Install the tested version (bash tools/setup.sh)"
        )
    ops._supports_onednn = False
