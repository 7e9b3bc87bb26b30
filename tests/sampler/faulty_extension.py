"""Faults that cannot be had otherwise: a live parameter that changes between the copy and its verification, and errors of the
transfer group that nobody thought of."""

from typing import Any, NoReturn

import torch

from prl.sampler.engine import WorkerExtension


class FaultyExtension(WorkerExtension):
    def corrupt_next_commit(self) -> None:
        """Flip one bit of one live parameter right after the next copy."""
        finish = self.finish_weight_update

        def finish_and_corrupt() -> None:
            finish()
            del self.finish_weight_update
            parameter = dict(self.weight_transfer_engine.model.named_parameters())["model.layers.1.self_attn.qkv_proj.weight"]
            bits = parameter.data.view(-1)[5:6].view(torch.int32)
            bits ^= 1

        self.finish_weight_update = finish_and_corrupt

    def break_group(self, method: str) -> None:
        """Let a method of the present transfer group (close, receive) fail with an error that is none of the transport's."""

        def fail(*_: Any) -> NoReturn:
            raise KeyError(f"{method} is broken")

        setattr(self.weight_transfer_engine._end, method, fail)
