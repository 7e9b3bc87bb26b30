"""What stands on a CPU for the two kernels of packed attention that need a GPU, with all that is above them in place: torch's
`varlen_attn` over flash attention, and Megatron's wrapper over Transformer Engine's attention.

Both compute sequence by sequence with torch's attention, refuse what the kernels refuse, and leave what they leave: tokens
beyond the greatest length that they are told are not computed.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from megatron.core import utils
from megatron.core.extensions import transformer_engine as wrappers
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from packaging.version import Version
from torch import Tensor
from torch.nn import functional

from prl.trainer import device, model, packing

Window = tuple[int, int]  # tokens before and after its own that a query sees; -1: all


@contextmanager
def varlen() -> Iterator[None]:
    """Attention by torch's `varlen_attn`, whatever the dtype."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        library.impl("_flash_attention_forward", _flash_forward)
        library.impl("_flash_attention_backward", _flash_backward)
        with mock.patch.object(device, "attention", return_value="varlen"):
            yield
    finally:
        library._destroy()


@contextmanager
def transformer_engine() -> Iterator[type[torch.nn.Module]]:
    """Models are built with Megatron's wrapper and its rotary embedding, and given sequences as with Transformer Engine; its
    other layers, and the rotary embedding's own kernel, are not there. Gives the wrapper."""
    engine = mock.MagicMock()
    engine.pytorch.DotProductAttention = _Attention
    names = {
        "transformer_engine": engine,
        "transformer_engine.pytorch": engine.pytorch,
        **{f"transformer_engine.pytorch.{name}": getattr(engine.pytorch, name) for name in ("fp8", "router")},
    }
    spec = importlib.util.spec_from_file_location("wrappers_with_an_engine", wrappers.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {**names, spec.name: module}))
        stack.enter_context(mock.patch.object(utils, "_te_version", Version("2.9.0")))
        spec.loader.exec_module(module)
        stack.enter_context(mock.patch.object(packing, "has_transformer_engine", return_value=True))
        attention = module.TEDotProductAttention
        stack.enter_context(mock.patch.multiple(model, PackedAttention=attention, PackedRotary=RotaryEmbedding))
        yield attention


class _Attention(torch.nn.Module):
    """Transformer Engine's of packed sequences, on one rank, with the arguments that Megatron may give it."""

    def __init__(
        self,
        *,
        num_attention_heads: int,
        kv_channels: int,
        attention_dropout: float,
        attn_mask_type: str,
        sequence_parallel: bool,
        tp_size: int,
        get_rng_state_tracker: object,
        tp_group: object,
        layer_number: int,
        num_gqa_groups: int,
        attention_type: str,
        softmax_scale: float | None,
        window_size: Window | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0
        assert attention_type == "self"
        self.heads = num_attention_heads // tp_size, num_gqa_groups // tp_size, kv_channels
        self.scale, self.window = softmax_scale, window_size or (-1, 0)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        attn_mask_type: str,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        cu_seqlens_q_padded: None,
        cu_seqlens_kv_padded: None,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        pad_between_seqs: None,
    ) -> Tensor:
        assert (attn_mask_type, qkv_format) == ("padding_causal", "thd")
        assert (query.size(1), key.size(1), key.size(2)) == self.heads
        _check(query, key, value, cu_seqlens_q, cu_seqlens_kv)
        longest = min(max_seqlen_q, max_seqlen_kv)
        return _attend(query, key, value, cu_seqlens_q, longest, self.scale, self.window).flatten(1)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    starts_of_keys: Tensor,
    most: int,
    most_keys: int,
    dropout: float,
    is_causal: bool,
    return_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
    **unused: Any,
) -> tuple[Tensor, ...]:
    assert dropout == 0
    _check(query, key, value, starts, starts_of_keys)
    window = (window_size_left, 0 if is_causal else window_size_right)
    output = _attend(query, key, value, starts, min(most, most_keys), scale, window)
    none = query.new_empty(0)
    return output, query.new_empty(query.size(1), len(query)), none, none.clone(), none.clone()


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    starts: Tensor,
    starts_of_keys: Tensor,
    most: int,
    most_keys: int,
    dropout: float,
    is_causal: bool,
    *unused: Tensor,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """With P the shares and O = P V:  dV = P' dO,  dP = dO V',  dS = P (dP - sum P dP),  dQ = s dS K,  dK = s dS' Q; heads that
    share keys and values add up."""
    window = (window_size_left, 0 if is_causal else window_size_right)
    each = query.size(1) // key.size(1)
    factor = query.size(-1) ** -0.5 if scale is None else scale
    found: list[list[Tensor]] = [[], [], []]
    for start, end in pairwise(starts.tolist()):
        q, k, v, of_output = (x[start:end].transpose(0, 1) for x in (query, key, value, gradient))
        k, v = k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)
        scores = (factor * q @ k.mT).masked_fill(~_seen(end - start, window), float("-inf"))
        shares = scores.softmax(-1)
        of_shares = of_output @ v.mT
        of_scores = factor * shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True))
        for of_input, values in zip(found, (of_scores @ k, of_scores.mT @ q, shares.mT @ of_output), strict=True):
            of_input.append(values.transpose(0, 1))
    of_query, of_key, of_value = map(torch.cat, found)
    of_key, of_value = (x.unflatten(1, (-1, each)).sum(2) for x in (of_key, of_value))
    return of_query.contiguous(), of_key, of_value


def _check(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, starts_of_keys: Tensor) -> None:
    for states in (query, key, value):
        assert states.ndim == 3
        assert states.stride(-1) == 1
        assert states.size(-1) % 8 == 0
    assert torch.equal(starts, starts_of_keys)
    assert starts.dtype == starts_of_keys.dtype == torch.int32
    assert starts.is_contiguous()
    assert (starts[0], starts[-1]) == (0, len(query))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None, window: Window
) -> Tensor:
    """[T, heads, head_dim] each -> [T, heads, head_dim]; NaN where nothing was computed."""
    found = []
    for start, end in pairwise(starts.tolist()):
        computed = min(end - start, longest)
        q, k, v = (x[start : start + computed].transpose(0, 1) for x in (query, key, value))
        output = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=_seen(computed, window), scale=scale, enable_gqa=True
        )
        left = end - start - computed
        found.append(functional.pad(output.transpose(0, 1), (0, 0, 0, 0, 0, left), value=float("nan")))
    return torch.cat(found)


def _seen(length: int, window: Window) -> Tensor:
    """Whether a query [length, 1] sees a key [1, length]."""
    before, after = (length if limit < 0 else limit for limit in window)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance <= before) & (-distance <= after)
