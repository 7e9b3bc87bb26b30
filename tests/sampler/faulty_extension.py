"""Faults that cannot be had otherwise: a live parameter that changes between the copy and its verification, a worker that lost
what its trainer thinks it holds, a bit that changes on its way, and errors of the transfer group that nobody thought of."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from prl.sampler.extension import WorkerExtension
from prl.weights.delta import HEADER_BYTES


class FaultyExtension(WorkerExtension):
    def corrupt_next_commit(self) -> None:
        """Flip one bit of one live parameter right after the next copy."""

        def flip() -> None:
            bits = self._parameter("model.layers.1.self_attn.qkv_proj.weight").data.view(-1)[5:6].view(torch.int32)
            bits ^= 1

        self._after_next_copy(flip)

    def swap_experts_of_next_commit(self) -> None:
        """Exchange two experts of a layer right after the next copy."""

        def swap() -> None:
            for part in ("w13", "w2"):
                weight = self._parameter(f"model.layers.1.mlp.experts.routed_experts.{part}_weight").data
                weight[[0, 2]] = weight[[2, 0]]

        self._after_next_copy(swap)

    def _after_next_copy(self, fault: Callable[[], None]) -> None:
        finish = self.finish_weight_update

        def finish_and_corrupt() -> None:
            finish()
            del self.finish_weight_update
            fault()

        self.finish_weight_update = finish_and_corrupt

    def _parameter(self, name: str) -> torch.nn.Parameter:
        return dict(self.weight_transfer_engine.model.named_parameters())[name]

    def forget_version(self) -> None:
        """Hold nothing that a delta could be applied to."""
        area = self.weight_transfer_engine._area
        area.held, area.live_legs = None, {}

    def flip_next_delta(self) -> None:
        """Another bit arrives in the first value of the next bucket that is told by its difference."""
        member = self.weight_transfer_engine._link.end._member
        broadcast = member.broadcast

        def and_flip(buffer: torch.Tensor, what: str, end: float) -> None:
            broadcast(buffer, what, end)
            if buffer.numel() != HEADER_BYTES:
                buffer[0] ^= 1
                member.broadcast = broadcast

        member.broadcast = and_flip

    def flip_next_bucket(self) -> None:
        """Another bit arrives in the next bucket of a lane that is begun: the highest of an exponent."""
        receiver = self.weight_transfer_engine._link.end._receiver
        begin, wait = receiver._begin, receiver._wait
        begun: dict[int, torch.Tensor] = {}  # by the number of the transfer

        def and_note(shipment: Any, buffer: torch.Tensor, end: float) -> Any:
            begun[shipment.number] = buffer
            return begin(shipment, buffer, end)

        def and_flip(shipment: Any, work: Any, end: float) -> None:
            wait(shipment, work, end)
            if (buffer := begun.get(shipment.number)) is not None:
                buffer[3] ^= 0x40
                receiver._begin, receiver._wait = begin, wait

        receiver._begin, receiver._wait = and_note, and_flip

    def break_group(self, method: str) -> None:
        """Let a method of the present transfer group (close, receive) fail with an error that is none of the transport's."""

        def fail(*_: Any, **__: Any) -> NoReturn:
            raise KeyError(f"{method} is broken")

        setattr(self.weight_transfer_engine._link.end, method, fail)
