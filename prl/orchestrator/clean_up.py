"""What a node agent that was killed could not end and remove: the process groups of its children, their shared memory, and its
folders of temporary files. `python -m prl.orchestrator.clean_up`, run on each node by the batch script of a job whose step has
failed, does it for the agents of that job; every agent does it at its start for those of its node that live no more.

An agent writes down among its temporary files what it has, and who it is. All of it is told by more than numbers, which the
system may have given to others since, and a folder counts only where it is this user's.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prl.orchestrator.leftovers import remove
from prl.orchestrator.process_groups import Group, is_there, signal_group, started_ticks
from prl.runfolder.paths import listed

RECORD = "agent.json"
KILLED_WITHIN_S = 5.0  # a killed process may need a moment to give up what it holds
LOOK_S = 0.05


@dataclass(frozen=True)
class Remains:
    """What a folder of temporary files says of the agent that made it."""

    host: str
    boot: str  # which start of the system it belongs to
    namespace: str  # of its process ids, which mean nothing in another one
    pid: int
    started_ticks: int | None
    groups: tuple[Group, ...]
    segments: tuple[Path, ...]  # of shared memory
    folders: tuple[Path, ...]  # beside this one


def prefix(job: str, task: int | str) -> str:
    """With which the name of the folder begins that a task's agent of a Slurm job (or `local`) makes on its node. By the task,
    each finds its own also where nodes share the folder of temporary files."""
    return f"prl-{job}-{task}-"


def record(folder: Path, groups: Iterable[Group], segments: Iterable[Path], folders: Iterable[Path]) -> None:
    """Write down in an agent's folder of temporary files what of it is here."""
    pid, boot, namespace = os.getpid(), _boot(), _namespace()
    remains = Remains(
        socket.gethostname(), boot, namespace, pid, started_ticks(pid), tuple(groups), tuple(segments), tuple(folders)
    )
    new = folder / f".{RECORD}"  # nobody else writes it
    new.write_text(json.dumps(asdict(remains), default=str))
    new.rename(folder / RECORD)


def clean(folder: Path) -> None:
    """End and remove all that an agent has left. What a dying process adds meanwhile is left."""
    remains = _read(folder)
    if remains is not None and remains.boot == _boot():
        for group in remains.groups:
            signal_group(group, signal.SIGKILL)
        end = time.monotonic() + KILLED_WITHIN_S
        while any(map(is_there, remains.groups)) and time.monotonic() < end:
            time.sleep(LOOK_S)
        remove(remains.segments)
    for one in (*(remains.folders if remains is not None else ()), folder):
        shutil.rmtree(one, ignore_errors=True)


def clean_dead() -> list[Path]:
    """The same for every agent of this user on this node that lives no more; their folders."""
    found = [folder for folder in _own("prl-") if _is_dead(folder)]
    for folder in found:
        clean(folder)
    return found


def _is_dead(folder: Path) -> bool:
    """Whether that is certain: not of a folder that is just being made, nor on another node where nodes share the folder of
    temporary files, nor of process ids in another container."""
    remains = _read(folder)
    if remains is None or remains.host != socket.gethostname():
        return False
    if remains.boot != _boot():
        return True
    return remains.namespace == _namespace() and started_ticks(remains.pid) != remains.started_ticks


def _own(start: str) -> list[Path]:
    """This user's folders of such names where temporary files lie."""
    found = []
    for path in listed(Path(tempfile.gettempdir()), f"{start}*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            facts = path.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
                found.append(path)
    return found


def _read(folder: Path) -> Remains | None:
    """None where the folder holds no such record: another program's, or just being made."""
    try:
        facts: dict[str, Any] = json.loads((folder / RECORD).read_bytes())
        groups = tuple(Group(**group) for group in facts["groups"])
        segments, folders = (tuple(map(Path, facts[key])) for key in ("segments", "folders"))
        return Remains(**facts | {"groups": groups, "segments": segments, "folders": folders})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _is_of(run: Path, folder: Path) -> bool:
    """Not where its children write to logs of another run: of a job that has the same number in another cluster, whose node has
    its temporary files here, too."""
    remains = _read(folder)
    return remains is None or all(Path(group.log).is_relative_to(run.resolve()) for group in remains.groups)


def main() -> None:
    run = Path(os.environ["PRL_RUN"])
    for folder in _own(prefix(os.environ["SLURM_JOB_ID"], os.environ["SLURM_PROCID"])):
        if _is_of(run, folder):
            clean(folder)


if __name__ == "__main__":
    main()
