"""The layers that replace Megatron's local ones: an RMSNorm that goes with sequence parallelism, attention and rotary
embedding of packed sequences without loops over them (Megatron's own cost seven times the step at 512 x 10 tokens)."""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from prl.trainer import device
from prl.trainer.packing import PackedSequences


class RMSNorm(torch.nn.RMSNorm):
    """Marks its weight where the sequence is split, so that Megatron sums its gradient over the tensor-parallel ranks (the
    stock one refuses sequence parallelism)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each packed sequence, within the model's window if it has one: one call of torch's attention over
    sequences of any lengths where the device has it, otherwise one of its fused attention a length bucket."""

    def __init__(self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"train.context_parallel = {config.context_parallel_size}: attention to other ranks' tokens needs Transformer "
                f"Engine and an accelerator, which are not both there; install it where trainers run, or set 1"
            )
        self.scale = softmax_scale
        self.before = config.window_size[0] if config.window_size else None  # tokens that one looks back to

    def forward(
        self,
        query: Tensor,  # [T, 1, heads, head_dim]
        key: Tensor,  # [T, 1, kv heads, head_dim]
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> Tensor:  # [T, 1, heads * head_dim]
        layout, starts = packed_seq_params.layout, packed_seq_params.boundaries
        if layout is None or starts is None:
            raise ValueError("packed attention needs the layout that packed_sequences() makes")
        if packed_seq_params.rotation is not None:
            query, key = _rotated(query, *packed_seq_params.rotation), _rotated(key, *packed_seq_params.rotation)
        tokens, _, heads, head_dim = query.shape
        shared = heads != key.size(2)
        if device.attention(query.dtype) == "varlen":
            longest = packed_seq_params.max_seqlen_q
            q, k, v = (x.squeeze(1) for x in (query, key, value))
            window = (-1 if self.before is None else self.before, 0)
            output = varlen_attn(
                q, k, v, starts, starts, longest, longest, scale=self.scale, window_size=window, enable_gqa=shared
            )
            assert isinstance(output, Tensor)  # two of them only where more is asked for
            return output.reshape(tokens, 1, heads * head_dim)
        q, k, v = (layout.pad(x.reshape(tokens, -1)) for x in (query, key, value))
        outputs = []
        for bucket in layout.buckets:
            rows = slice(bucket.start, bucket.start + bucket.sequences * bucket.width)
            qs, ks, vs = (x[rows].view(bucket.sequences, bucket.width, -1, head_dim).transpose(1, 2) for x in (q, k, v))
            seen = (
                None
                if self.before is None or bucket.width <= self.before + 1
                else _seen(bucket.width, self.before, query.device)
            )
            output = functional.scaled_dot_product_attention(
                qs, ks, vs, attn_mask=seen, is_causal=seen is None, scale=self.scale, enable_gqa=shared
            )
            outputs.append(output.transpose(1, 2).reshape(-1, heads * head_dim))
        return layout.unpad(torch.cat(outputs) if len(outputs) > 1 else outputs[0]).unsqueeze(1)


class PackedRotary(RotaryEmbedding):  # type: ignore[misc]
    """Rotary embedding of each packed token by its position.

    Megatron asks for a length and then for that many angles, of which each layer would take the cosines and sines anew, twice.
    Here the "length" is the sequences, which get them once a micro-batch; Megatron has nothing to rotate, but PackedAttention.
    """

    def get_rotary_seq_len(
        self,
        inference_context: None,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedSequences | None = None,
        **unused: Any,
    ) -> PackedSequences:
        if packed_seq_params is None or packed_seq_params.positions is None:
            raise ValueError("the model takes packed sequences only: give it what packed_sequences() makes")
        return packed_seq_params

    def forward(self, sequences: PackedSequences, **unused: Any) -> None:
        if sequences.rotation is None and sequences.positions is not None:
            angles = torch.outer(sequences.positions.to(torch.float32), self.inv_freq)[:, None, None, :]
            sequences.rotation = angles.cos(), angles.sin()


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [T, 1, heads, head_dim] turned by the angles [T, 1, 1, head_dim / 2], a pair of its two halves each."""
    first, second = x.chunk(2, -1)
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def _seen(width: int, before: int, place: torch.device) -> Tensor:
    """Whether a token [width, 1] looks at another [1, width]: at itself and `before` ones."""
    positions = torch.arange(width, device=place)
    distances = positions[:, None] - positions
    return (distances >= 0) & (distances <= before)
