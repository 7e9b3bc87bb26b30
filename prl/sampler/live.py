"""A worker's live parameters: written over, compared with what was received, copied out by another thread."""

import threading
from collections.abc import Iterable

import torch

from prl.sampler.placement import Part, Placement


def live_tensors(parts: Iterable[Part]) -> list[torch.Tensor]:
    return [part.live for part in parts if isinstance(part, Placement)]


def write_live(part: Part, shard: torch.Tensor) -> None:
    """Raises ValueError where a part that another worker counts is not there afterwards."""
    assert isinstance(part, Placement)
    part.live.copy_(shard)
    if not part.counted:
        check_live(part, shard)


def check_live(part: Placement, shard: torch.Tensor) -> None:
    """Bit for bit. Raises ValueError where they differ."""
    if not _same_bits(part.live, shard):
        raise ValueError(f"{part.spec.name}: the live copy differs from what was received")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    for bits in (torch.int64, torch.int32, torch.int16):  # the larger the faster
        if not any(number % bits.itemsize for t in (one, other) for number in (t.storage_offset(), t.numel())):
            return torch.equal(one.view(bits), other.view(bits))
    return torch.equal(one, other)


class LiveEnded(Exception):
    """The live version is about to be replaced; says by what."""


class LiveWeights:
    """The live version for one who stores it: copies of its shards, until somebody is about to replace it."""

    def __init__(self, ended: str = "") -> None:
        self._ended = ended
        self._lock = threading.Lock()

    @property
    def ended(self) -> str:
        """Why there are no more copies; empty while there are."""
        return self._ended

    def copy(self, placement: Placement) -> torch.Tensor:
        """Of the shard, on the host. Raises LiveEnded."""
        with self._lock:
            if self._ended:
                raise LiveEnded(self._ended)
            return placement.live.detach().to("cpu", copy=True).reshape(placement.shape)

    def end(self, why: str) -> None:
        """There are no more copies once this returns; it waits for one of a single shard."""
        with self._lock:
            self._ended = self._ended or why
