"""What Slurm's commands print, as values: text in formats of our own choice alone. Their `--json` had another shape in each of
22.05, 23.02, 23.11 and 24.05, heeds no filter in 22.05, and scontrol has none there; the text has stayed the same since 21.08.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from prl.cluster.run import ProgramError

QUEUE_FORMAT = "%i|%T|%S|%N|%r"  # of squeue; the reason is last, as it is free text
ACCOUNTING_FIELDS = "JobID,State,ExitCode,Start,End,NodeList"  # of sacct -P; none in which a user can write a |
NODE_FORMAT = "%P|%N|%c|%m|%G|%l"  # of sinfo -N

# Every state that squeue and sacct know up to 25.05. Those of a job that goes on, the one that says most first: where one
# component runs, the job does. Then those of one that has ended, the worst first.
RUNNING = (
    "RUNNING",
    "COMPLETING",
    "STAGE_OUT",
    "SIGNALING",
    "RESIZING",
    "SUSPENDED",
    "STOPPED",
    "CONFIGURING",
    "POWER_UP_NODE",
)
WAITING = ("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING", "PENDING")
ENDED = (
    "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "FAILED", "PREEMPTED",
    "CANCELLED", "REVOKED", "COMPLETED",
)  # fmt: skip
STATES = (*RUNNING, *WAITING, *ENDED)

_JOB_ID = re.compile(r"(\d+(?:_(?:\d+|\[[^]]*\]))?)(?:\+(\d+))?")  # 63, 63+1, 6_1, 6_[3-5%2]
_SUBMITTED = re.compile(r"^Submitted batch job (\d+)(?: on cluster \S+)?$", re.MULTILINE)
_EXPECTED = re.compile(
    r"Job \d+ to start at (\S+)(?: a)? using \d+ processors on (?:nodes )?(\S+)(?: in partition \S+)?", re.MULTILINE
)
_SAID_BY = re.compile(r"^(?:sbatch: |srun: )?(?:error: |fatal: )?(?:allocation failure: |Batch job submission failed: )?")
_NO_TIME = ("N/A", "None", "NONE", "Unknown", "")
_GPUS = re.compile(r"(?:^|,)gpu:(?:(?:[^:,()]+|\(null\)):)?(\d+)")  # in "gpu:h100:4(S:0-1),nic:2"
_TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class SlurmOutputError(ProgramError):
    """An answer of Slurm's that cannot be read; the message quotes it."""


@dataclass(frozen=True)
class JobRow:
    """One component of a heterogeneous job, or a whole job."""

    job_id: str  # a component's is that of the leader
    component: int
    state: str  # one of STATES
    start: datetime | None  # by the cluster's clock; expected where the job waits; None where not known
    nodes: str  # as Slurm writes a list of hosts; empty before there are any
    reason: str = ""  # why it waits
    exit_code: str = ""  # "code:signal"


@dataclass(frozen=True)
class NodeRow:
    partition: str
    name: str
    cpus: int
    memory_mib: int
    gpus: int
    limit_min: int | None  # of the partition's jobs, in minutes; None: no limit


@dataclass(frozen=True)
class Expected:
    """What `sbatch --test-only` answers: when and where a job would start, or why it is refused."""

    start: datetime | None
    nodes: str
    refusal: str  # empty where there is none


def parse_state(text: str) -> str:
    """One of STATES, from a word that may have something behind it (`CANCELLED by 0`) or be cut off (`OUT_OF_ME+`). Raises
    SlurmOutputError for one that is not known."""
    word = next(iter(text.split()), "")
    whole = word.removesuffix("+")
    found = [state for state in STATES if state == whole or (whole != word and state.startswith(whole))]
    if whole in found or len(found) == 1:
        return whole if whole in found else found[0]
    raise SlurmOutputError(f"Slurm calls the job's state {text!r}, which prl does not know; see scontrol show job")


def fold_states(states: Sequence[str]) -> str:
    """One state for all components of a job: what still goes on, else the worst end."""
    return min(map(parse_state, states), key=STATES.index)


def has_ended(state: str) -> bool:
    """Whether a state is one that does not change any more."""
    return state in ENDED


def parse_queue(text: str) -> list[JobRow]:
    """Rows of `squeue -h -o QUEUE_FORMAT`."""
    rows = []
    for line in _lines(text):
        job, state, start, nodes, reason = _cells(line, 5, "squeue")
        number, component = _job(job)
        rows.append(JobRow(number, component, parse_state(state), _time(start), nodes, "" if reason == "None" else reason))
    return rows


def parse_accounting(text: str) -> list[JobRow]:
    """Rows of `sacct -P`, whose header names ACCOUNTING_FIELDS or more: of each job and component the last one, which is that
    of the present run of a job that was requeued; steps are left out."""
    rows: dict[tuple[str, int], JobRow] = {}
    for row in _accounted(text):
        rows.pop((row.job_id, row.component), None)
        rows[row.job_id, row.component] = row
    return list(rows.values())


def parse_runs(text: str) -> list[list[JobRow]]:
    """Rows of `sacct -D -P` of one job: those of its components, once for each time that it was put into the queue."""
    components: dict[int, list[JobRow]] = {}
    for row in _accounted(text):
        components.setdefault(row.component, []).append(row)
    longest = max(map(len, components.values()), default=0)
    return [[rows[number] for rows in components.values() if number < len(rows)] for number in range(longest)]


def _accounted(text: str) -> Iterator[JobRow]:
    lines = _lines(text)
    names = next(lines, "").split("|")
    for line in lines:
        cells = dict(zip(names, _cells(line, len(names), "sacct"), strict=True))
        try:
            if "." in cells["JobID"]:
                continue
            number, component = _job(cells["JobID"])
            start, nodes = _time(cells["Start"]), cells["NodeList"].replace("None assigned", "")
            yield JobRow(number, component, parse_state(cells["State"]), start, nodes, exit_code=cells["ExitCode"])
        except KeyError as error:
            raise SlurmOutputError(f"sacct: its header {'|'.join(names)!r} has no {error}") from None


def parse_nodes(text: str) -> list[NodeRow]:
    """Rows of `sinfo -h -N -o NODE_FORMAT`: a node once for each of its partitions."""
    rows = []
    for line in _lines(text):
        partition, name, cpus, memory, resources, limit = _cells(line, 6, "sinfo")
        try:
            numbers = int(cpus.rstrip("+")), int(memory.rstrip("+")), sum(map(int, _GPUS.findall(resources)))
        except ValueError:
            raise SlurmOutputError(f"sinfo: a line of its answer cannot be read: {line!r}") from None
        rows.append(NodeRow(partition.rstrip("*"), name, *numbers, parse_minutes(limit)))
    return rows


def parse_minutes(text: str) -> int | None:
    """A time limit in minutes, rounded up, as Slurm writes and reads it: 90, 90:00, 1:30:00, 1-12, 1-12:30, 1-12:30:00; None
    for one without end. Raises SlurmOutputError."""
    if text.lower() in ("infinite", "unlimited", "none", "n/a"):
        return None
    match = _TIME_LIMIT.fullmatch(text)
    if match is None:
        raise SlurmOutputError(f"{text!r} is no time limit; write minutes, or e.g. 12:00:00 or 1-12:00:00")
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is None and len(given) < 3:
        given = [0, *given]  # minutes come first, without days in front of them
    hours, minutes, seconds = [*given, 0, 0][:3]
    return math.ceil((((days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds) / 60)


def parse_memory_mib(text: str) -> int:
    """Memory in MiB, as Slurm reads it: 1000, 1000M, 200G. Raises SlurmOutputError."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", text.upper())
    if match is None:
        raise SlurmOutputError(f"{text!r} is no amount of memory; write MiB, or e.g. 200G")
    return int(int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]])


def parse_submitted(text: str) -> str:
    """The job's id from what sbatch printed, which may begin with a site's banner."""
    found = _SUBMITTED.findall(text)
    if not found:
        raise SlurmOutputError(f"sbatch: its answer names no job: {text.strip()[-2000:]!r}; see squeue --me for one")
    return str(found[-1])


def parse_expected(text: str) -> Expected:
    """What `sbatch --test-only` printed."""
    found = _EXPECTED.search(text)
    if found:
        return Expected(_time(found[1]), found[2], "")
    said = dict.fromkeys(_SAID_BY.sub("", line) for line in _lines(text))
    return Expected(None, "", "; ".join(said) or "sbatch gave no answer")


def _lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip())


def _cells(line: str, number: int, program: str) -> list[str]:
    cells = [cell.strip() for cell in line.split("|", number - 1)]
    if len(cells) != number:
        raise SlurmOutputError(f"{program}: a line of its answer cannot be read: {line!r}")
    return cells


def _job(text: str) -> tuple[str, int]:
    """(job id, component)."""
    match = _JOB_ID.fullmatch(text)
    if match is None:
        raise SlurmOutputError(f"{text!r} is no job id of Slurm's")
    return match[1], int(match[2] or 0)


def _time(text: str) -> datetime | None:
    if text in _NO_TIME:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise SlurmOutputError(f"{text!r} is no time as Slurm writes it; is SLURM_TIME_FORMAT set?") from None
