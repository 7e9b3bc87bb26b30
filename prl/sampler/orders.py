"""What a worker is asked for: to join the group of an epoch, to receive or read a version, to store the live one."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass(kw_only=True)
class ConnectInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the group of an epoch meets. The trainer's `facts` are compared with ours before, and `tensors`, where given,
    checked against the model. With `lanes` it has groups of those."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    epoch: int
    timeout_s: float
    facts: dict[str, Any]
    tensors: list[list[Any]] | None = None
    lanes: dict[str, Any] | None = None


@dataclass(kw_only=True)
class ReceiveInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that comes next over the group of `epoch`."""

    lineage: int
    step: int
    epoch: int
    tensors: list[list[Any]]
    bucket_bytes: int


@dataclass(frozen=True)
class LoadInfo:
    """The version that is to be read from files. `epoch` and `seed` (0: none) go back with the report."""

    lineage: int
    step: int
    epoch: int
    seed: int
    tensors: list[list[Any]]


@dataclass(frozen=True)
class StoreInfo:
    """Where this worker's part of the live version is to be written; `seed` goes back with the report."""

    seed: int
    folder: str
    tensors: list[list[Any]]
