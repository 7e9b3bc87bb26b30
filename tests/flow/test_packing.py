"""Packing and dealing; the queue of groups."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from prl.flow.groups import GroupQueue
from prl.flow.packing import deal, pack


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 100), min_size=1, max_size=80), st.integers(100, 300), st.integers(1, 8))
def test_every_sequence_is_in_one_bin(lengths, capacity, ranks):
    bins = pack(lengths, capacity, ranks)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert len(bins) % ranks == 0 or len(bins) == len(lengths)
    assert all(bins)
    assert max(sum(lengths[i] for i in b) for b in bins) <= capacity
    # any two bins of plain best fit are fuller than one bin together, so there are fewer than twice the fewest possible
    assert len(pack(lengths, capacity)) <= max(1, 2 * sum(lengths) // capacity + 1)


def test_best_fit_by_hand():
    # 7 opens a bin (3 left), 6 another (4 left), 4 fills the second, 3 the first, 2 opens the third
    assert pack([2, 7, 4, 3, 6], 10) == [[1, 3], [4, 2], [0]]
    # for two ranks four bins, level: 7, 6, 4, 3 open them and 2 goes to 3
    assert pack([2, 7, 4, 3, 6], 10, ranks=2) == [[1], [4], [2], [3, 0]]
    # levelling would make 5 4 and 5 3 3, too long: the full bins 5 5 and 4 3 3 stay
    assert pack([3, 5, 4, 3, 5], 10, ranks=2) == [[1, 4], [2, 0, 3]]
    assert pack([6, 5, 5, 4, 3, 3, 3], 10, ranks=3) == [[0, 3], [1, 2], [4, 5, 6]]
    assert pack([5, 5], 10, ranks=2) == [[0], [1]]
    # three bins are needed, four would leave one empty
    assert pack([34, 67, 67], 100, ranks=2) == [[1], [2], [0]]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=64), st.sampled_from([1, 2, 4, 8]))
def test_every_bin_is_dealt_once(tokens, ranks):
    dealt = deal(tokens, ranks)
    assert sorted(b for rank in dealt for b in rank) == list(range(len(tokens)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    loads = [sum(tokens[b] for b in rank) for rank in dealt]
    if len(tokens) % ranks == 0:
        assert max(loads) - min(loads) <= max(tokens)


def test_deal_by_hand():
    assert deal([5, 9, 1, 3], 2) == [[1, 2], [0, 3]]


@pytest.mark.parametrize("capacity", [8192, 16384])
@pytest.mark.parametrize("seed", range(6))
def test_long_tailed_lengths_waste_little_and_load_evenly(capacity, seed):
    lengths = np.clip(np.random.default_rng(seed).lognormal(6.87, 0.9, 4096), 1, 8192).astype(int)
    packed = len(pack(lengths, capacity))
    assert 1 - lengths.sum() / (packed * capacity) < 0.005
    bins = pack(lengths, capacity, ranks=8)
    assert len(bins) == -(-packed // 8) * 8
    loads = [sum(lengths[i] for b in rank for i in bins[b]) for rank in deal([lengths[b].sum() for b in bins], 8)]
    assert max(loads) / np.mean(loads) < 1.002


def test_sequences_that_do_not_fit():
    with pytest.raises(ValueError, match="do not fit bins of 10"):
        pack([3, 11], 10)
    with pytest.raises(ValueError, match="do not fit"):
        pack([3, 0], 10)
    with pytest.raises(ValueError, match="0 sequences"):
        pack([], 10)


def test_group_queue():
    arrival, dispatch = GroupQueue("arrival"), GroupQueue("dispatch")
    for queue in (arrival, dispatch):
        for group in (4, 1, 3, 1, 0):
            queue.add(group)
    assert arrival.in_order() == [4, 1, 3, 0]
    assert dispatch.in_order(3) == [0, 1]
    dispatch.remove(1)
    dispatch.remove(1)
    assert dispatch.in_order(5) == [0, 3, 4]
    assert len(dispatch) == 3
    with pytest.raises(ValueError, match="needs to know"):
        dispatch.in_order()
