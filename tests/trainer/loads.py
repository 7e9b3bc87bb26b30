"""What must hold of every load of a checkpoint, in whatever split, beside the values that it brings."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from prl.trainer.checkpoint_reader import InPlaceReader
from prl.trainer.engine import Engine

Read = tuple[str, Tensor]  # the name of what was read, and where to


@contextmanager
def watched_load() -> Iterator[list[Read]]:
    """What is read meanwhile. Memory that nobody fills is NaN."""
    found: list[Read] = []
    read = InPlaceReader._read

    def watched(self: InPlaceReader, item: ReadItem, target: Tensor) -> None:
        read(self, item, target)
        found.append((item.storage_index.fqn, target))

    InPlaceReader._read = watched
    torch.use_deterministic_algorithms(True)
    try:
        yield found
    finally:
        torch.use_deterministic_algorithms(False)
        InPlaceReader._read = read


def check_load(engine: Engine, found: list[Read]) -> None:
    """All that the engine has was filled, with nothing that another rank's optimizer needs, and without a copy: but for what
    two data-parallel ranks have parts of, bytes go where they stay."""
    optimizers = [one for one in engine.optimizer.chained_optimizers if not one.is_stub_optimizer]
    states = list(chain.from_iterable(one.optimizer.state.values() for one in optimizers))
    mains = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    models = list(chain.from_iterable(gpt.parameters() for gpt in engine.gpts))
    recent = chain.from_iterable(gpt.parameters() for gpt in (engine.proximal.gpts if engine.proximal else ()))
    held = [*models, *mains, *recent, *chain.from_iterable(state.values() for state in states)]
    assert states
    assert all(bool(tensor.isfinite().all()) for tensor in held)
    storages = {tensor.untyped_storage().data_ptr() for tensor in held}
    moved = sum(target.numel() for _, target in found if target.untyped_storage().data_ptr() not in storages)
    moments = sum(target.numel() for name, target in found if name.startswith("optimizer.state.exp_avg."))
    assert moments > 0
    if engine.options.distributed_optimizer:
        owned = list(chain.from_iterable(one.model_param_group_index_map for one in optimizers))
        parts = [p for one in optimizers for p in one.model_param_group_index_map if _is_part(one, p)]
        assert moments <= sum(parameter.numel() for parameter in owned)
        assert moved <= 3 * sum(parameter.numel() for parameter in parts)
    else:
        assert moments <= sum(parameter.numel() for parameter in mains)
        assert not moved


def _is_part(optimizer: object, parameter: Tensor) -> bool:
    return optimizer._get_model_param_range_map(parameter)["param"].size < parameter.numel()  # type: ignore[attr-defined]
