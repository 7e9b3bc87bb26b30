"""The ledger of a run in columns: what happened to every id, in the order in which it was recorded.

Some 60 bytes an event.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prl.report.audit_ids import Findings, Ids, Int64

KINDS = ("issued", "trained", "discarded", "issued_again")
ISSUED, TRAINED, DISCARDED, AGAIN = range(4)


class Ledger:
    """The ledger as columns, in the order in which it was recorded, and every issued id with its rows."""

    def __init__(self, table: pa.Table, forks: Mapping[int, int], findings: Findings) -> None:
        table = table.combine_chunks()
        column = {name: table.column(name).combine_chunks() for name in table.column_names}
        plain = {
            name: column[name].to_numpy(zero_copy_only=False).astype(np.int64)
            for name in ("group_id", "issue", "rollout", "epoch", "version_lineage", "version_step", "step")
        }
        sound = Ids.in_range(plain["group_id"], plain["issue"], plain["rollout"])
        for row in np.flatnonzero(~sound).tolist():
            findings.add(f"the ledger's row {row}", "an id beyond all bounds")
        self.key: Int64 = Ids.keys(plain["group_id"], plain["issue"], plain["rollout"])
        self.lineage, self.step, version_step = plain["version_lineage"], plain["step"], plain["version_step"]
        names = column["event"].dictionary.to_pylist()
        codes = np.array([KINDS.index(name) if name in KINDS else -1 for name in names] or [-1], np.int64)
        self.kind = codes[column["event"].indices.to_numpy()] if len(table) else np.empty(0, np.int64)
        self.reasons: list[str] = column["reason"].dictionary.to_pylist()
        self.reason = column["reason"].indices.to_numpy().astype(np.int64)
        self.problems = Problems(plain["group_id"], plain["epoch"], column["problem_id"])
        findings.add_ids(self.key[self.kind < 0], "an event of no known kind")
        findings.add_ids(self.key[self.problems.strange], "is of another problem or epoch than its group's first row")
        wrong = (self.kind == TRAINED) & ((version_step != self.step) | (self.step < 1))
        findings.add_ids(self.key[wrong], "trained in a step that does not make the version beside it")

        self.ids: Int64 = np.unique(self.key[self.kind == ISSUED])
        self.at: Int64 = np.searchsorted(self.ids, self.key)  # of each row, which id
        self.known = np.zeros(len(self.key), bool)
        if len(self.ids):
            self.at = np.minimum(self.at, len(self.ids) - 1)
            self.known = self.ids[self.at] == self.key
        self.survives = self._survives(forks)
        self.ends = self.survives | (self.kind == DISCARDED) | (self.kind == AGAIN)

    def _survives(self, forks: Mapping[int, int]) -> npt.NDArray[np.bool_]:
        """Whether a trained row is no later than the step at which each later lineage that trained anything left the one before
        (`forks`, or the step before its first)."""
        trained = self.kind == TRAINED
        limit, limits = np.iinfo(np.int64).max, {}
        for lineage in np.unique(self.lineage[trained])[::-1].tolist():
            limits[lineage] = limit
            first = int(self.step[trained & (self.lineage == lineage)].min())
            limit = min(limit, forks.get(lineage, first - 1), first - 1)
        found = np.zeros(len(self.key), bool)
        for lineage, last in limits.items():
            found |= trained & (self.lineage == lineage) & (self.step <= last)
        return found

    def per_id(self, rows: npt.NDArray[np.bool_]) -> Int64:
        """How many of these rows each issued id has."""
        return np.bincount(self.at[rows & self.known], minlength=len(self.ids))

    def first_row(self, rows: npt.NDArray[np.bool_]) -> Int64:
        """The first of these rows that each issued id has; beyond the last row where there is none."""
        first = np.full(len(self.ids), len(self.key))
        chosen = np.flatnonzero(rows & self.known)
        np.minimum.at(first, self.at[chosen], chosen)
        return first

    def contains(self, keys: Int64) -> npt.NDArray[np.bool_]:
        """Which of these were issued."""
        return np.isin(keys, self.ids)

    def tell(self, key: int) -> str:
        """All that happened to an id."""
        parts = []
        for row in np.flatnonzero(self.key == key).tolist():
            kind = KINDS[self.kind[row]].replace("_", " ")
            if self.kind[row] == TRAINED:
                abandoned = "" if self.survives[row] else ", abandoned since"
                kind += f" in step {self.step[row]} of lineage {self.lineage[row]}{abandoned}"
            elif self.kind[row] != ISSUED:
                kind += f" ({self.reasons[self.reason[row]]})"
            parts.append(kind)
        return ", ".join(parts)


class Problems:
    """The problem and epoch of every group, as the ledger has them first."""

    def __init__(self, groups: Int64, epochs: Int64, problems: pa.DictionaryArray) -> None:
        codes = problems.indices.to_numpy().astype(np.int64)
        self._groups, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
        self._epochs, self._codes = epochs[first], codes[first]
        self._names = problems.dictionary
        self.strange = (self._epochs[inverse] != epochs) | (self._codes[inverse] != codes)

    def strangers(self, groups: Int64, epochs: Int64, problems: pa.Array) -> npt.NDArray[np.bool_]:
        """Which of these rows speak of another problem or epoch. Groups that the ledger has not are passed over."""
        if not len(self._groups) or not len(groups):
            return np.zeros(len(groups), bool)
        at = np.minimum(np.searchsorted(self._groups, groups), len(self._groups) - 1)
        known: npt.NDArray[np.bool_] = self._groups[at] == groups
        names = problems.dictionary if isinstance(problems, pa.DictionaryArray) else None
        if names is None:
            problems = problems.dictionary_encode()
            names = problems.dictionary
        numbers = {name: number for number, name in enumerate(self._names.to_pylist())}
        codes = np.array([numbers.get(name, -1) for name in names.to_pylist()], np.int64)[problems.indices.to_numpy()]
        strange: npt.NDArray[np.bool_] = known & ((codes != self._codes[at]) | (epochs != self._epochs[at]))
        return strange
