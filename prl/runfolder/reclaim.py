"""The record of stream files that were deleted on purpose, and of those set aside because they cannot be read: what they were,
so that an audit can tell them from lost ones."""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from prl.config.plain_files import NotPlainError, open_plain, read_plain
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish_json, storage, sync_folder, write_all

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """A deleted file. `groups` (pairs of group and issue) is of rollout files, `step` of step files (otherwise -1)."""

    kind: Literal["rollouts", "step"]
    path: str  # relative to the run folder
    bytes: int
    checksum: str
    groups: tuple[tuple[int, int], ...] = ()
    step: int = -1


def record_reclaimed(run: RunFolder, files: Iterable[Reclaimed]) -> None:
    """Append to the record; durable on return, and to be called before the files are deleted. Raises OSError."""
    data = "".join(json.dumps(asdict(file)) + "\n" for file in files).encode()
    with storage(run.reclaimed), run.reclaimed.open("ab", buffering=0) as record:
        if record.tell() and not _ends_with_newline(run):  # a line that was torn by a crash spoils none after it
            data = b"\n" + data
        write_all(record.fileno(), data)
        os.fsync(record.fileno())
    sync_folder(run.reclaimed.parent)


def read_reclaimed(run: RunFolder) -> list[Reclaimed]:
    """All that was recorded. A torn line, whose files were not deleted, is passed over; raises ValueError for any other that
    is no record."""
    try:
        text = read_plain(run.reclaimed).decode(errors="replace")
    except FileNotFoundError:
        return []
    except NotPlainError as error:
        raise ValueError(str(error)) from error
    found = []
    for line in text.splitlines():
        try:
            facts = json.loads(line)
        except ValueError:
            continue
        except RecursionError as error:
            raise ValueError(f"{run.reclaimed}: no record of a deleted file ({error}): {line[:200]}") from error
        try:
            found.append(_reclaimed(facts))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{run.reclaimed}: no record of a deleted file ({error!r}): {line[:200]}") from error
    return found


def move_aside(run: RunFolder, path: Path, groups: Iterable[tuple[int, int]]) -> None:
    """Keep a stream file that is of no use in quarantine, for a person to look at, and beside it the groups, with their
    issues, that it was announced with. Where it cannot be moved, the log says so, and it stays."""
    kept = kept_aside(run, path)
    try:
        run.quarantine.mkdir(exist_ok=True)
        publish_json(_beside(kept), list(groups))
        os.rename(path, kept)
    except FileNotFoundError:
        pass  # it never showed, or another reader was first
    except OSError as error:
        log.warning("%s could not be moved to %s: %s", path, run.quarantine, error)


def kept_aside(run: RunFolder, path: Path) -> Path:
    """Where a stream file lies once it was set aside."""
    return run.quarantine / f"{path.parent.name}_{path.name}"


def read_aside(run: RunFolder) -> Iterator[tuple[int, int]]:
    """(group, issue) of all that lies in quarantine and is known. Raises ValueError for a record that is none."""
    for kept in sorted(run.quarantine.glob("*.arrow")):
        if os.path.lexists(_beside(kept)):
            try:
                yield from _pairs(json.loads(read_plain(_beside(kept))))
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"{_beside(kept)}: no record of a file in quarantine ({error!r})") from error


def _reclaimed(facts: Mapping[str, Any]) -> Reclaimed:
    """Raises KeyError, TypeError or ValueError."""
    kind, path, checksum = facts["kind"], facts["path"], facts["checksum"]
    if kind not in ("rollouts", "step") or not (isinstance(path, str) and isinstance(checksum, str)):
        raise ValueError("another kind, or a name that is no text")
    return Reclaimed(kind, path, _number(facts["bytes"]), checksum, _pairs(facts["groups"]), _number(facts["step"]))


def _pairs(values: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((_number(group), _number(issue)) for group, issue in values)


def _number(value: object) -> int:
    """JSON has numbers that no column of an audit holds."""
    if type(value) is not int or not -1 <= value < 2**63:
        raise ValueError(f"{value!r:.50} is no number of a file or a group")
    return value


def _beside(kept: Path) -> Path:
    return kept.with_name(f"{kept.name}.json")


def _ends_with_newline(run: RunFolder) -> bool:
    with open_plain(run.reclaimed) as record:
        record.seek(-1, os.SEEK_END)
        return record.read(1) == b"\n"
