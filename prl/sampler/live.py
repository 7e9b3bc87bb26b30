"""A worker's live parameters while another thread copies them out."""

import threading

import torch

from prl.sampler.placement import Placement


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
