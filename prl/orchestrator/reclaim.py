"""Deletion of stream files that nobody can need any more, behind a durable checkpoint.

That is the one before the newest (prl/orchestrator/checkpoints.py). A resume from it needs the step files behind it and the
rollouts of groups that were in flight when it was made. So there are deleted: step files up to its step, and rollout files all
of whose groups had ended by then; but never the last file of a folder, from which whoever writes there learns its next sequence
number, and never the ledger. What is deleted is recorded first, so that an audit can tell it from what was lost. Rollouts that
lie in no files (but in Redis) are let go of by the preprocessor.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from prl.runfolder.paths import RunFolder
from prl.runfolder.reclaim import Reclaimed, record_reclaimed
from prl.streams.files import StreamError, StreamFile, list_published
from prl.streams.folder import rollout_files
from prl.streams.reader import read_rows

Pairs = tuple[tuple[int, int], ...]  # of group and issue
log = logging.getLogger(__name__)


@dataclass
class Reclaimer:
    """`files` and `bytes` count what was deleted in this attempt, `failures` what could not be, or could not be looked into."""

    run: RunFolder
    name: str  # of the run, as in its files' headers
    attempt: int
    in_files: bool = True  # where rollouts lie
    files: int = 0
    bytes: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        # Of rollout files that are still there, by path in the run folder; None: it cannot be read, and stays.
        self._groups: dict[str, Pairs | None] = {}

    def announced(self, announcement: Mapping[str, Any]) -> None:
        """Learn what lies in a rollout file of this attempt."""
        if self.in_files:
            groups = announcement["groups"]
            self._groups[str(announcement["path"])] = tuple((int(g["group"]), int(g["issue"])) for g in groups)

    def reclaim(self, step: int, state: Mapping[str, Any]) -> None:
        """Delete what lies behind the durable checkpoint of `step`; `state` is the dispatcher's in its manifest. Whatever fails
        is logged and counted, and tried again next time."""
        try:
            files = [*self._steps(step), *self._rollouts(partial(_had_ended, state))]
            if files:
                record_reclaimed(self.run, files)
        except OSError as error:
            log.warning("nothing was reclaimed behind step %d: %s", step, error)
            self.failures += 1
            return
        for file in files:
            try:
                (self.run.path / file.path).unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s could not be deleted: %s", file.path, error)
                self.failures += 1
                continue
            self._groups.pop(file.path, None)
            self.files += 1
            self.bytes += file.bytes

    def metrics(self) -> dict[str, float]:
        return {
            "streams/reclaimed_files": float(self.files),
            "streams/reclaimed_bytes": float(self.bytes),
            "streams/reclaim_failures": float(self.failures),
        }

    def _steps(self, step: int) -> Iterator[Reclaimed]:
        for stem, file in list_published(self.run.steps)[:-1]:
            number = stem.removeprefix("step_")
            if number.isdigit() and int(number) <= step:
                yield Reclaimed("step", self._name(file), file.bytes, file.checksum, step=int(number))

    def _rollouts(self, had_ended: Callable[[int, int], bool]) -> Iterator[Reclaimed]:
        for files in rollout_files(self.run).values():
            for file in files[:-1]:
                name = self._name(file)
                if name not in self._groups and file.attempt < self.attempt:
                    self._groups[name] = self._groups_in(file)
                groups = self._groups.get(name)  # None also: not announced yet
                if groups is not None and all(had_ended(group, issue) for group, issue in groups):
                    yield Reclaimed("rollouts", name, file.bytes, file.checksum, groups)

    def _groups_in(self, file: StreamFile) -> Pairs | None:
        """What an earlier attempt's file holds. Another run's says nothing of this one's groups."""
        try:
            found = read_rows(file.path, file.bytes, file.checksum, run=self.name)
        except (OSError, StreamError) as error:
            log.warning("a rollout file of an earlier attempt is kept, since what it holds cannot be read: %s", error)
            self.failures += 1
            return None
        return tuple(pair for rows in found for pair in rows.issues())

    def _name(self, file: StreamFile) -> str:
        return file.path.relative_to(self.run.path).as_posix()


def _had_ended(state: Mapping[str, Any], group: int, issue: int) -> bool:
    """Whether this issue of a group had come to its end by the time of a dispatcher's state."""
    flight = state["groups"].get(str(group))
    return group < state["next_group"] if flight is None else issue < int(flight["issue"])
