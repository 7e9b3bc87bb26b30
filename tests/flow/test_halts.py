"""Whose fault it is that a transfer did not end: against a model of one in which only one rank stands still."""

from hypothesis import given
from hypothesis import strategies as st

from prl.flow.halts import COMPLETE, Halt, laggards

DEADLINE_S, LEAST_S = 100.0, 25.0


def behind(index, size):
    """Of the broadcast's ranks 0 (the trainer) to `size` - 1: those who get it through this one, and itself."""
    found = {index}
    for rank in range(index + 1, size):
        if rank - (1 << rank.bit_length() - 1) in found:
            found.add(rank)
    return found


@st.composite
def transfers(draw):
    """Where all workers were when one of them, or the trainer (None), had stood still before a part since `stopped_s`."""
    replicas, lanes = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    parts = draw(st.integers(3, 50))
    guilty = draw(st.none() | st.tuples(st.integers(0, replicas - 1), st.integers(0, lanes - 1)))
    part, stopped_s = draw(st.integers(0, parts - 1)), draw(st.floats(1.0, DEADLINE_S - 1.0))
    slept = draw(st.booleans())  # else its own connection is slow
    found = {}
    for lane in range(lanes):
        stuck = behind(guilty[0] + 1, replicas + 1) if guilty is not None and guilty[1] == lane else set()
        ahead = draw(st.integers(1, 2)) if stuck else 0
        found[lane] = {}
        for replica in range(replicas):
            reached = part if replica + 1 in stuck else part + ahead
            waited_s = 0.1 if slept and guilty == (replica, lane) else DEADLINE_S - stopped_s
            found[lane][replica] = Halt(reached, waited_s) if reached < parts else COMPLETE
    return guilty, slept, stopped_s, replicas, found


@given(transfers())
def test_only_the_one_that_stood_still_is_named_or_what_lies_behind_it_too(transfer):
    guilty, slept, stopped_s, replicas, halts = transfer
    named = laggards([list(lane.items()) for lane in halts.values()], LEAST_S)
    if guilty is None:
        assert named == {}
        return
    replica, lane = guilty
    stuck = {rank - 1 for rank in behind(replica + 1, replicas + 1)}
    complete = COMPLETE in halts[lane].values()
    if len(stuck) == replicas or (DEADLINE_S - stopped_s < LEAST_S and not complete):
        assert set(named) <= stuck
    else:
        assert set(named) == ({replica} if slept else stuck)
        assert named[replica] in (0.0, DEADLINE_S - stopped_s)


@given(st.integers(0, 50), st.lists(st.tuples(st.booleans(), st.floats(0, LEAST_S - 0.1)), min_size=1, max_size=6))
def test_a_transfer_that_is_slow_as_a_whole_is_nobodys_fault(part, replicas):
    """Some have got a part that others wait for still, at the time when the deadline passes."""
    halts = [(replica, Halt(part + ahead, waited_s)) for replica, (ahead, waited_s) in enumerate(replicas)]
    assert laggards([halts], LEAST_S) == {}


def test_of_a_lane_that_the_trainer_does_not_send_nobody_is_named():
    """Though the other lanes wait, too, and are further."""
    lanes = [[(0, Halt(12, 50.0)), (1, Halt(12, 50.0))], [(0, Halt(9, 60.0)), (1, Halt(9, 60.0))]]
    assert laggards(lanes, LEAST_S) == {}
    assert laggards([], LEAST_S) == {}


def test_of_a_replica_in_one_group_with_others_one_slow_worker_is_enough():
    """Though its other one is as far as all."""
    group = [(0, Halt(5, 60.0)), (0, Halt(5, 60.0)), (1, Halt(5, 60.0)), (1, Halt(4, 0.1))]
    assert laggards([group], LEAST_S) == {1: 60.0}
