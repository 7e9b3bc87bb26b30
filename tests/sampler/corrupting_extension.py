"""A fault that cannot be had otherwise: a live parameter that changes between the copy and its verification."""

import torch

from prl.sampler.engine import WorkerExtension


class CorruptingExtension(WorkerExtension):
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
