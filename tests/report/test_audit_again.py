"""Ends that were exchanged in the ledger: issued again for discarded, and the other way round."""

from dataclasses import replace

import pyarrow as pa
import pytest

from prl.flow.events import LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.report.audit_again import check_issued_again
from prl.report.audit_ids import Findings
from prl.report.audit_ledger import Ledger
from prl.streams.ledger import LedgerWriter, read_ledger


def rows(group: int, kind: str, issue: int = 0, reason: str = "", rollouts=(0, 1, 2)) -> list[LedgerEvent]:
    ids = [RolloutId(0, f"digits/{group}", group, rollout, issue) for rollout in rollouts]
    return [LedgerEvent(i, kind, Version(0, 0), -1, reason) for i in ids]


BEGIN = [*rows(0, "issued"), *rows(1, "issued")]
ENDS = [*rows(0, "issued_again", reason="actor 0 lost"), *rows(1, "discarded", reason="all rewards equal")]
AGAIN = rows(0, "issued", issue=1)
NEW = rows(2, "issued")


def findings_of(events: list[LedgerEvent], folder) -> list[str]:
    with LedgerWriter(folder) as writer:
        writer.append(events)
    table: pa.Table = read_ledger(folder)
    findings = Findings()
    check_issued_again(Ledger(table, {}, findings), findings)
    return [f"{what} {wrong}" for what, wrong in findings.named]


def exchanged(events: list[LedgerEvent], one: int, other: int) -> list[LedgerEvent]:
    """The ends of two ids, each with its reason."""
    changed = list(events)
    for here, there in ((one, other), (other, one)):
        changed[here] = replace(events[here], kind=events[there].kind, reason=events[there].reason)
    return changed


@pytest.mark.parametrize("discarded", [0, 1, 2])
@pytest.mark.parametrize("again", [0, 1, 2])
def test_exchanged_ends_are_told_where_a_new_group_was_handed_out_later(tmp_path, again, discarded):
    good = [*BEGIN, *ENDS, *AGAIN, *NEW]
    assert findings_of(good, tmp_path / "good") == []
    found = findings_of(exchanged(good, 6 + again, 9 + discarded), tmp_path / "bad")
    assert "group 1 issue 0 was issued again, but never handed out again, though new groups were" in found
    behind = "rollout {} was discarded after its issue had been issued again"
    assert (f"group 1 issue 0 {behind.format(2)}" in found) == (discarded < 2)
    assert (f"group 0 issue 0 {behind.format(again)}" in found) == (again > 0)


def test_without_a_new_group_an_exchange_is_told_unless_the_rows_could_have_come_about_like_that(tmp_path):
    good = [*BEGIN, *ENDS, *AGAIN]
    untold = [
        (again, discarded)
        for again in range(3)
        for discarded in range(3)
        if not findings_of(exchanged(good, 6 + again, 9 + discarded), tmp_path / f"{again}{discarded}")
    ]
    assert untold == [(0, 2)]


def test_an_issue_is_issued_again_at_once(tmp_path):
    """Of group 0 rollout 0 was given up, then group 1 ended, then the actor was lost."""
    given_up = rows(0, "discarded", reason="verifier", rollouts=[0])
    ended, lost = rows(1, "discarded", reason="all rewards equal"), rows(0, "issued_again", rollouts=[1, 2])
    good = [*BEGIN, *given_up, *ended, *lost, *AGAIN, *NEW]
    assert findings_of(good, tmp_path / "good") == []
    bad = [replace(event, kind="issued_again") if event is given_up[0] else event for event in good]
    assert findings_of(bad, tmp_path / "bad") == ["group 0 issue 0 was issued again at several times"]
