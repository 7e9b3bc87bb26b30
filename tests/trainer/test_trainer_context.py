"""How sequences are cut over context-parallel ranks; that training with it is the same, test_trainer_layouts.py shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as some
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_data import BASE, microbatches

from prl.config.hf_config import model_config
from prl.trainer import packing
from prl.trainer.batch import idle_microbatch, to_device
from prl.trainer.context import computed_tokens, cut_sequences, idle_tokens
from prl.trainer.layers import PackedAttention, _rotated
from prl.trainer.model import transformer_config
from prl.trainer.options import TrainOptions

LENGTHS = some.lists(some.integers(1, 40), min_size=1, max_size=8)
RANKS = some.integers(2, 5)
quick = settings(max_examples=50, deadline=None)


def packed(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


@contextmanager
def alone_as(rank: int, ranks: int) -> Iterator[dist.ProcessGroup]:
    """This process takes itself for one rank of a group, in which nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_two_ranks_share_three_sequences():
    """Filled up to 8, 4 and 8 tokens; the tokens of the second one begin at 5, those of the third one at 6."""
    first, second = (cut_sequences(packed([5, 1, 8]), rank, 2) for rank in (0, 1))
    numbers = torch.arange(14)
    assert first.boundaries.tolist() == second.boundaries.tolist() == [0, 8, 12, 20]
    assert first.own(numbers, -1).tolist() == [0, 1, -1, -1, 5, -1, 6, 7, 12, 13]
    assert first.positions.tolist() == [0, 1, 6, 7, 0, 3, 0, 1, 6, 7]
    assert second.own(numbers, -1).tolist() == [2, 3, 4, -1, -1, -1, 8, 9, 10, 11]
    assert second.positions.tolist() == [2, 3, 4, 5, 1, 2, 2, 3, 4, 5]
    everywhere = torch.cat([first.own(numbers, -1), second.own(numbers, -1)])
    assert everywhere[first.slot_of_token].tolist() == everywhere[second.slot_of_token].tolist() == list(range(14))


@quick
@given(LENGTHS, RANKS)
def test_every_token_is_on_one_rank_in_the_chunk_of_its_place(lengths, ranks):
    boundaries = packed(lengths)
    cuts = [cut_sequences(boundaries, rank, ranks) for rank in range(ranks)]
    assert len({len(cut.positions) for cut in cuts}) == 1
    held = [cut.own(torch.arange(sum(lengths)), -1) for cut in cuts]
    everywhere = torch.cat(held)
    assert sorted(everywhere[everywhere >= 0].tolist()) == list(range(sum(lengths)))
    assert everywhere[cuts[-1].slot_of_token].tolist() == list(range(sum(lengths)))
    for start, length in zip(boundaries, lengths, strict=False):
        chunk = -(-length // (2 * ranks))
        for position in range(length):
            number = position // chunk
            (slot,) = (held[min(number, 2 * ranks - 1 - number)] == start + position).nonzero()
            assert cuts[min(number, 2 * ranks - 1 - number)].positions[slot] == position


@quick
@given(some.integers(1, 60), RANKS)
def test_one_sequence_is_cut_as_megatron_does(length, ranks):
    filled = -(-length // (2 * ranks)) * 2 * ranks
    tokens = torch.arange(filled)
    for rank in range(ranks):
        with alone_as(rank, ranks) as group:
            theirs = get_batch_on_this_cp_rank({"tokens": tokens[None], "cu_seqlens": None}, False, cp_group=group)["tokens"][0]
        cut = cut_sequences(packed([length]), rank, ranks)
        assert cut.positions.tolist() == theirs.tolist()
        assert cut.own(torch.arange(length), -1).tolist() == [n if n < length else -1 for n in theirs.tolist()]


@quick
@given(LENGTHS, RANKS)
def test_megatron_turns_the_slots_by_the_same_positions(lengths, ranks):
    """Its rotary embedding of packed sequences, which layers of Transformer Engine have, goes by where sequences begin."""
    frequencies = torch.tensor([1.0, 0.1, 0.01])
    for rank in range(ranks):
        cut = cut_sequences(packed(lengths), rank, ranks)
        states = torch.randn(len(cut.positions), 2, 6)
        angles = torch.arange(np.diff(cut.boundaries).max())[:, None, None, None] * frequencies.repeat(2)
        with alone_as(rank, ranks) as group:
            theirs = _apply_rotary_pos_emb_thd(states, torch.from_numpy(cut.boundaries), angles, cp_group=group)
        own = torch.outer(cut.positions.float(), frequencies)[:, None, None, :]
        torch.testing.assert_close(_rotated(states[:, None], own.cos(), own.sin())[:, 0], theirs)


@quick
@given(LENGTHS, some.integers(1, 5), some.integers(1, 4))
def test_tensor_parallel_ranks_can_share_the_slots(lengths, ranks, tensor):
    boundaries = packed(lengths)
    slots = computed_tokens(boundaries, tensor, ranks)
    assert slots % tensor == 0
    idle = idle_tokens(boundaries, tensor, ranks)
    assert idle < 2 * ranks * tensor
    whole = packed([*lengths, idle] if idle else lengths)
    assert slots == (len(cut_sequences(whole, 0, ranks).positions) if ranks > 1 else whole[-1])


def test_a_rank_has_its_tokens_and_the_whole_loss():
    micro = microbatches()[0]  # 7, 12 and 2 tokens
    routings = np.arange(21 * 2).reshape(21, 2, 1).astype(np.int32)
    whole = to_device(micro, 3)
    for rank in (0, 1):
        batch = to_device(replace(micro, routings=routings), 3, context_rank=rank, context_parallel=2)
        # Filled up to 8, 12 and 4 tokens: 12 slots a rank, which 3 tensor-parallel ranks can share.
        chunks = [((0, 2), (6, 7)), ((7, 10), (16, 19)), ((19, 20),)] if rank == 0 else [((2, 6),), ((10, 16),), ((20, 21),)]
        numbers = [number for sequence in chunks for start, end in sequence for number in range(start, end)]
        assert batch.cut is not None
        kept = batch.cut.is_token
        assert len(batch.tokens) == 12
        assert batch.tokens[kept].tolist() == micro.tokens[numbers].tolist()
        assert batch.positions[kept].tolist() == micro.positions[numbers].tolist()
        assert batch.targets[kept].tolist() == whole.targets[numbers].tolist()
        assert batch.sequences.routings[kept].tolist() == routings[numbers].tolist()
        assert (batch.sequences.routings[~kept] == -1).all()
        for name in ("weights", "advantages", "old_logprobs", "reference_logprobs", "lags"):
            assert torch.equal(getattr(batch, name), getattr(whole, name)), name
        assert torch.equal(batch.sequence_numbers.of_token, whole.sequence_numbers.of_token)


def test_a_rank_without_work_has_slots_like_the_others():
    assert [len(to_device(idle_microbatch(), 1, context_rank=rank, context_parallel=4).tokens) for rank in range(4)] == [2] * 4


def test_transformer_engine_is_told_of_filled_up_sequences(monkeypatch):
    monkeypatch.setattr(packing, "has_transformer_engine", lambda: True)
    told = to_device(microbatches()[0], 1, context_rank=1, context_parallel=2).sequences
    assert told.qkv_format == "thd"
    for starts in (told.cu_seqlens_q, told.cu_seqlens_kv, told.cu_seqlens_q_padded, told.cu_seqlens_kv_padded):
        assert starts.dtype is torch.int32
        assert starts.tolist() == [0, 8, 20, 24]
    assert (told.max_seqlen_q, told.max_seqlen_kv) == (12, 12)
    alone = to_device(microbatches()[0], 1).sequences
    assert alone.cu_seqlens_q.tolist() == [0, 7, 19, 21]
    assert alone.cu_seqlens_q_padded is None


def test_a_trainer_without_transformer_engine_refuses():
    config = transformer_config(model_config(BASE | {"model_type": "qwen3"}), TrainOptions(context_parallel=2))
    with pytest.raises(ValueError, match=r"train\.context_parallel = 2: .*Transformer Engine"):
        PackedAttention(config)
