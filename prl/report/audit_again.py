"""What an audit can tell of rollouts that were issued again, apart from those that were discarded.

Both ends are a row of the ledger and nothing else: no file says which of the two it was. But they have other consequences, in
the ledger's order. All of an issue that has not ended is issued again at once, in rows that follow one another, and nothing of
that issue is discarded behind them. And groups that wait to be sampled again are handed out before any new one. (That an issue
is not handed out unless something of the one before was issued again, the check of the numbers sees.)

What nothing durable tells is where the rows could have come about as they stand: of an issue that was issued again, the first
rows as discarded, as those that an actor gave up before the rest was lost, or the other way round; and the last rows of an
issue behind which no new group was handed out.
"""

import numpy as np

from prl.report.audit_ids import Findings, Ids, pairs_of
from prl.report.audit_ledger import AGAIN, DISCARDED, ISSUED, Ledger


def check_issued_again(ledger: Ledger, findings: Findings) -> None:
    """Rows by which an issue was issued again, and others that contradict it."""
    pairs, issued, rows = pairs_of(ledger.key), ledger.kind == ISSUED, np.arange(len(ledger.key))
    again = np.flatnonzero(ledger.kind == AGAIN)
    if not len(again):
        return
    ended, index, counts = np.unique(pairs[again], return_index=True, return_counts=True)  # (group, issue)
    first, last = again[index], np.zeros(len(ended), np.int64)
    np.maximum.at(last, np.searchsorted(ended, pairs[again]), again)
    findings.add_groups(ended[last - first >= counts], "was issued again at several times")
    at = np.minimum(np.searchsorted(ended, pairs), len(ended) - 1)
    behind = (ended[at] == pairs) & (ledger.kind == DISCARDED) & (rows > first[at])
    findings.add_ids(ledger.key[behind], "was discarded after its issue had been issued again")
    last_new = rows[issued & (Ids.issue_of_pair(pairs) == 0)].max(initial=-1)
    waits = ~np.isin(ended + 1, pairs[issued]) & (first < last_new)
    findings.add_groups(ended[waits], "was issued again, but never handed out again, though new groups were")
