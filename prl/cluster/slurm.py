"""Questions to Slurm, each with a time-out."""

from prl.cluster.executors import GOING_ON, fold_states
from prl.cluster.run import Output, ProgramError, Runner, run
from prl.cluster.split import Split
from prl.config.schema import Config


class SlurmError(Exception):
    """Slurm does not answer, or cannot do what is asked; the message says what to do."""


def check_slurm(config: Config, split: Split, runner: Runner = run) -> None:
    """Whether a controller answers and the partition has as many nodes as the job needs (Slurm itself lets a heterogeneous
    job that can never start wait for ever). Raises SlurmError."""
    wanted = f"the run asks for {split.nodes} Slurm nodes"
    local = "run without --nodes and with cluster.nodes: null to use this machine alone"
    try:
        ping: Output = runner(["scontrol", "ping"], timeout_s=15.0, check=False)
    except ProgramError as error:
        raise SlurmError(f"{wanted}, but {error}; submit from a login node, or {local}") from None
    if " UP" not in ping.out:
        said = (ping.out.strip() or ping.err.strip()).splitlines()
        raise SlurmError(
            f"{wanted}, but no Slurm controller answers (scontrol ping: "
            f"{said[0] if said else 'no output'}); ask the site's operators, or {local}"
        )
    partition = config.cluster.partition
    asked = ["sinfo", "-h", "-N", "-o", "%N", *(["-p", partition] if partition else [])]
    try:
        names = set(runner(asked, timeout_s=30.0).out.split())
    except ProgramError as error:
        raise SlurmError(str(error)) from None
    where = f"partition {partition}" if partition else "the cluster"
    if not names:
        raise SlurmError(f"cluster.partition = {partition}: Slurm knows no nodes of it (sinfo lists the partitions)")
    if len(names) < split.nodes:
        raise SlurmError(f"the run asks for {split.nodes} nodes, but {where} has {len(names)}; the job would wait for ever")


def job_state(job_id: str, runner: Runner = run) -> str | None:
    """State of a job, over all its components; None where neither the queue nor the accounting knows it (any more).
    Raises ProgramError where Slurm does not answer."""
    queue: Output = runner(["squeue", "-h", "-j", job_id, "-o", "%T"], timeout_s=30.0, check=False)
    if queue.code == 0 and queue.out.split():
        return fold_states(queue.out.splitlines())
    if queue.code != 0 and "Invalid job id" not in queue.err:
        raise ProgramError(f"squeue: {queue.err.strip() or queue.out.strip()}")
    account: Output = runner(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"], timeout_s=30.0, check=False)
    if account.code != 0 and "accounting storage is disabled" not in account.err:
        raise ProgramError(f"sacct: {account.err.strip() or account.out.strip()}")
    states = [line for line in account.out.splitlines() if line.strip()]
    return fold_states(states) if states else None


def ended(state: str | None) -> bool:
    """Whether a state is one that does not change any more."""
    return state not in GOING_ON
