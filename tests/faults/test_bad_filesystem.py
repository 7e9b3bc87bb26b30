"""Streams on a filesystem that shows names late, tears writes and answers ESTALE, ENOSPC and EDQUOT: nothing is lost, nothing
is doubled, and what is announced can be read."""

import errno
import random
from collections import Counter

import pytest
from fault_layer import LOOKS, FaultLayer, Operation
from hypothesis import given, settings
from hypothesis import strategies as st
from publishing import RUN, groups_there, make_events, make_group, make_run, make_step, open_reader, open_writer

from prl.config.schema import Config
from prl.domains.options import DomainOptions
from prl.orchestrator.resume import ResumeError, find_start
from prl.runfolder.publish import publish, publish_json
from prl.streams.files import next_sequence
from prl.streams.ledger import LedgerWriter, ledger_events, read_ledger
from prl.streams.steps import find_steps, read_step, write_step

FULL = ("ENOSPC", "EDQUOT")
TRIES = 100


class Weather:
    """Faults at random: to writers each operation's with a chance, to readers the first looks at each name."""

    def __init__(self, seed: int, chance: float = 0.2, looks: int = 1) -> None:
        self.faults: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._chance = chance
        self._looks = looks
        self._looked: Counter[str] = Counter()

    def writer(self, operation: Operation) -> str | None:
        faults = {"write": ("short", "short", *FULL), "open": ("ESTALE",)}.get(operation.kind, (*FULL, "ESTALE"))
        if (operation.kind in LOOKS and operation.kind != "open") or self._random.random() > self._chance:
            return None
        return self._met(self._random.choice(faults))

    def reader(self, operation: Operation) -> str | None:
        if operation.kind not in ("read", "stat") or not operation.path.endswith(".arrow"):
            return None
        self._looked[operation.path] += 1
        if self._looked[operation.path] > self._random.randint(0, self._looks):
            return None
        return self._met("late" if operation.kind == "stat" else self._random.choice(("late", "ESTALE")))

    def _met(self, fault: str) -> str:
        self.faults[fault] += 1
        return fault


def check_ours(error: OSError) -> None:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ESTALE):
        raise error


def until_done(work):
    """The result of something that is tried again as its words say it may be; faults here are rarer than tries."""
    for _ in range(TRIES):
        try:
            return work()
        except OSError as error:
            check_ours(error)
    pytest.fail(f"not done in {TRIES} tries")


@given(seed=st.integers(0, 2**32 - 1), rolls=st.lists(st.integers(1, 4), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_rollouts_arrive_once_each(tmp_path_factory, seed, rolls):
    """A writer that tries again, as long as it takes; a reader that goes by announcements, and one that goes by listing."""
    run = make_run(tmp_path_factory.mktemp("run"))
    weather, number, announced = Weather(seed), 0, []
    with FaultLayer(run.path, weather.writer):
        writer = until_done(lambda: open_writer(run))
        for count in rolls:
            for _ in range(count):
                writer.append(make_group(number))
                number += 1
            announced += until_done(writer.flush)
    names = [entry.name for entry in announced]
    assert len(set(names)) == len(names)
    reader = open_reader(run)
    with FaultLayer(run.path, weather.reader):
        read = [group.group for entry in announced for group in reader.read(entry, wait_s=30)]
    assert read == list(range(number))
    assert groups_there(run) == list(range(number))
    assert reader.unreadable == 0


@given(hidden=st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_reader_that_lists_sees_late_names_once_they_show(tmp_path_factory, hidden):
    """`hidden`: which of a folder's files a listing lacks, one time after another; not always the last."""
    run = make_run(tmp_path_factory.mktemp("run"))
    reader, writer = open_reader(run), open_writer(run)
    published = []
    for number in range(5):
        writer.append(make_group(number))
        published += writer.flush()
    for late in [*hidden, set()]:
        names = {published[number].name for number in late}
        with FaultLayer(run.path, lambda operation, names=names: "late" if operation.path in names else None):
            entries = reader.entries()
        assert [group.group for entry in entries for group in reader.read(entry)] == [n for n in range(5) if n not in late]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_steps_are_there_once_and_whole(tmp_path_factory, seed):
    run = make_run(tmp_path_factory.mktemp("run"))
    weather = Weather(seed)
    with FaultLayer(run.path, weather.writer):
        for step in range(1, 5):
            sequence = next_sequence(run.steps)
            until_done(
                lambda step=step, sequence=sequence: write_step(
                    run.steps, *make_step(step), run=RUN, attempt=1, sequence=sequence
                )
            )
    files = find_steps(run.steps)
    assert list(files) == [1, 2, 3, 4]
    with FaultLayer(run.path, weather.reader):
        read = [read_step(f.path, f.bytes, f.checksum, run=RUN, wait_s=30).facts.step for f in files.values()]
    assert read == [1, 2, 3, 4]
    assert {path.name for path in run.steps.iterdir() if path.suffix == ".arrow"} == {f.path.name for f in files.values()}


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_the_ledger_holds_what_was_acknowledged(tmp_path_factory, seed):
    """Each attempt appends until something fails, then another begins."""
    run = make_run(tmp_path_factory.mktemp("run"))
    weather, acknowledged, asked = Weather(seed, chance=0.1), [], []
    number = 0
    with FaultLayer(run.path, weather.writer):
        for attempt in range(1, 6):
            writer = until_done(lambda attempt=attempt: LedgerWriter(run.ledger(attempt)))
            try:
                for _ in range(4):
                    asked.append(number)
                    writer.append(make_events(number, 1))
                    acknowledged.append(number)
                    number += 1
            except OSError as error:
                check_ours(error)
                number += 1
    found = [event.rollout.group for event in ledger_events(read_ledger(run.ledgers))]
    assert len(set(found)) == len(found)
    assert set(acknowledged) <= set(found) <= set(asked)
    assert found == sorted(found)


def test_an_attempt_whose_ledger_shows_late_is_not_passed_over(tmp_path):
    """Else its rollout ids would be issued a second time."""
    run, config = make_run(tmp_path), Config(domains=(DomainOptions(name="digits"),))
    for attempt in (1, 2):
        run.attempt(attempt).mkdir()
        with LedgerWriter(run.ledger(attempt)) as writer:
            writer.append(make_events(attempt))
        publish_json(run.attempt(attempt) / "control.json", {"url": "http://127.0.0.1:1"})
    late = {"streams/ledger/attempt_002", "streams/ledger/attempt_002/ledger_0000.frames"}
    for hidden in (late, {max(late)}):
        plan = FaultLayer(tmp_path, lambda operation, hidden=hidden: "late" if operation.path in hidden else None)
        with plan, pytest.raises(ResumeError, match=r"attempt 2 .* may show it late"):
            find_start(run, config)


@pytest.mark.parametrize("fault", FULL)
@pytest.mark.parametrize("kind", ["create", "write", "fsync", "rename"])
def test_a_full_filesystem_is_told_with_its_path_and_leaves_nothing(tmp_path, fault, kind):
    path = tmp_path / "file"
    with FaultLayer(tmp_path, lambda operation: fault if operation.kind == kind else None), pytest.raises(OSError) as raised:
        publish(path, b"12345678")
    assert raised.value.errno == getattr(errno, fault)
    assert str(path) in str(raised.value)
    assert "space" in str(raised.value)
    assert list(tmp_path.iterdir()) == ([path] if kind == "fsync" and path.exists() else [])
