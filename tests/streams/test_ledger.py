"""The ledger: order, torn tails, damage, a killed writer."""

import os
import signal
import subprocess
import sys

import pytest
from unprivileged import unprivileged

from prl.flow.events import LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.streams.files import StreamError
from prl.streams.ledger import LedgerWriter, ledger_events, read_ledger


def events_of(group: int, kind="issued", reason="", step=-1) -> list[LedgerEvent]:
    return [LedgerEvent(RolloutId(0, f"digits/{group}", group, k, 1), kind, Version(1, 4), step, reason) for k in range(3)]


def read(folder) -> list[LedgerEvent]:
    return list(ledger_events(read_ledger(folder)))


def test_events_come_back_in_order_over_attempts(tmp_path):
    written = []
    for attempt in (1, 2):
        for _ in range(2):  # two starts of the orchestrator in one attempt
            with LedgerWriter(tmp_path / f"attempt_{attempt:03d}") as ledger:
                for group in range(3):
                    batch = events_of(group) + events_of(group, "trained", "", 5) + events_of(group, "discarded", "too old")
                    ledger.append(batch)
                    written += batch
                ledger.append([])
    assert read(tmp_path) == written
    assert read(tmp_path / "attempt_002") == written[len(written) // 2 :]
    assert read(tmp_path / "attempt_003") == []
    table = read_ledger(tmp_path)
    assert table.column_names[0] == "epoch"
    assert table.num_rows == len(written)


def test_a_torn_tail_loses_the_last_append_alone(tmp_path):
    with LedgerWriter(tmp_path) as ledger:
        ledger.append(events_of(0))
        whole = ledger.path.stat().st_size
        ledger.append(events_of(1))
    data = ledger.path.read_bytes()
    for end in [*range(whole, whole + 20), *range(whole + 20, len(data), 61), len(data) - 1]:
        ledger.path.write_bytes(data[:end])
        assert read(tmp_path) == events_of(0)
    for tail in (b"\0" * 100, data[whole:-40] + b"\0" * 40):  # what a power cut leaves where the size came first
        ledger.path.write_bytes(data[:whole] + tail)
        assert read(tmp_path) == events_of(0)


def test_damage_before_the_end_is_an_error(tmp_path):
    with LedgerWriter(tmp_path) as ledger:
        for group in range(3):
            ledger.append(events_of(group))
    data = ledger.path.read_bytes()
    for at in (0, 5, 9, 14, 30, len(data) // 2):
        damaged = bytearray(data)
        damaged[at] ^= 16
        ledger.path.write_bytes(damaged)
        with pytest.raises(StreamError, match="damaged at byte"):
            read_ledger(tmp_path)


def test_nothing_follows_a_failed_append(tmp_path, monkeypatch):
    with LedgerWriter(tmp_path) as ledger:
        ledger.append(events_of(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", _no_space)
            with pytest.raises(OSError, match="No space"):
                ledger.append(events_of(1))
        with pytest.raises(StreamError, match="an earlier append failed"):
            ledger.append(events_of(2))


def _no_space(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


WRITER = """
import sys
from pathlib import Path
from prl.flow.events import LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.streams.ledger import LedgerWriter
ledger = LedgerWriter(Path(sys.argv[1]))
for group in range(10**6):
    ledger.append([LedgerEvent(RolloutId(0, "d/0", group, k, 0), "issued", Version(0, 0), -1, "") for k in range(500)])
    print(group, flush=True)
"""


def test_a_killed_writer_has_kept_what_it_acknowledged(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    acknowledged = 19 + len(process.stdout.read().split())
    process.wait()
    groups = [e.rollout.group for e in read(tmp_path)][::500]
    assert groups == list(range(len(groups)))
    assert acknowledged <= groups[-1] <= acknowledged + 1


def test_an_attempt_that_may_not_be_read_is_not_taken_for_empty(tmp_path):
    assert read(tmp_path / "absent") == []
    for attempt in (1, 2):
        with LedgerWriter(tmp_path / f"attempt_00{attempt}") as ledger:
            ledger.append(events_of(attempt))
    (tmp_path / "attempt_001").chmod(0)
    with unprivileged(tmp_path), pytest.raises(PermissionError, match="attempt_001"):
        read(tmp_path)
    (tmp_path / "attempt_001").chmod(0o755)
    assert len(read(tmp_path)) == 6
