"""The processes of a run on this machine, known by the environment that the run gave them."""

import os

import psutil

from prl.runfolder.paths import RunFolder

KILLED_WITHIN_S = 10.0  # a killed process may need a moment where the machine is busy


def processes_of(folder: RunFolder, attempt: int | None = None) -> list[psutil.Process]:
    """This user's processes that an attempt of the run (any attempt: None) started here without Slurm, with all that those
    started; parents before their children."""
    wanted = os.path.realpath(folder.path)
    started = [p for p in psutil.process_iter(["uids"]) if _own(p) and _is_of(p, wanted, attempt)]
    found = {process.pid: process for process in started}
    for process in started:
        try:
            found.update({child.pid: child for child in process.children(recursive=True)})
        except psutil.Error:
            continue  # has ended meanwhile
    return sorted(found.values(), key=lambda process: process.create_time())


def first_processes(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those whose parent is not among them: asked to end, they end the others in order."""
    pids = {process.pid for process in processes}
    return [process for process in processes if _parent(process) not in pids]


def end_processes(folder: RunFolder, attempt: int, grace_s: float) -> int:
    """Ask what an attempt left running on this machine to end (SIGTERM); kill what is still there after `grace_s` seconds.
    How many processes there were."""
    processes = processes_of(folder, attempt)
    if not processes:
        return 0
    if grace_s > 0:
        for process in first_processes(processes):
            _signal(process, kill=False)
        psutil.wait_procs(processes, timeout=grace_s)
    left = processes_of(folder, attempt)
    for process in left:
        _signal(process, kill=True)
    psutil.wait_procs(left, timeout=KILLED_WITHIN_S)
    return len(processes)


def attempt_of(process: psutil.Process) -> str:
    """The number of the attempt that the process belongs to."""
    try:
        return str(process.environ().get("PRL_ATTEMPT", "?"))
    except psutil.Error:
        return "?"  # has ended meanwhile


def _own(process: psutil.Process) -> bool:
    uids = process.info["uids"]
    return uids is not None and uids.real == os.getuid()


def _is_of(process: psutil.Process, wanted: str, attempt: int | None) -> bool:
    try:
        environment = process.environ()
        run, number = environment.get("PRL_RUN"), environment.get("PRL_ATTEMPT")
        if not run or number is None or environment.get("SUBMITIT_EXECUTOR") == "slurm":
            return False
        if os.path.realpath(run) != wanted or (attempt is not None and number != str(attempt)):
            return False
        arguments = process.cmdline()
    except (psutil.Error, OSError):
        return False  # has ended meanwhile, or lets nobody look
    return any(argument.startswith(("prl.", "submitit.")) for argument in arguments)


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return  # has ended meanwhile
