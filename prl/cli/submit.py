"""prl-submit CONFIG: check a configuration, write the run folder, send the job.

prl-submit configs/quickstart.yaml               this machine, with live progress
prl-submit configs/quickstart.yaml --nodes 3     one heterogeneous Slurm job
prl-submit --resume runs/quickstart              go on from the latest checkpoint
prl-submit configs/quickstart.yaml --replay runs/quickstart --set run.folder=runs/again run.steps=10
                                                 train on that run's step files, without samplers
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from prl.cli import console
from prl.cli.ending import explain, full_filesystem
from prl.cli.interrupts import Cancelled, Interrupts
from prl.cli.options_text import describe_options
from prl.cli.progress import follow
from prl.cluster import submission
from prl.cluster.run import ProgramError
from prl.cluster.slurm import SlurmError, check_slurm
from prl.cluster.split import Split, make_split
from prl.cluster.submission import Submission, SubmissionError
from prl.config.checks import check, check_numbers
from prl.config.layout import layout_problems
from prl.config.load import ConfigError, load, replace
from prl.config.machine import free_memory_bytes
from prl.config.memory import (
    describe_memory,
    describe_weights,
    fullest_rank,
    gathered_bytes,
    kept_bytes,
    microbatch_tokens,
    saved_on_a_node,
    size_in_words,
)
from prl.config.model_checks import model_of
from prl.config.paths import current_folder, resolve_paths
from prl.config.resumed import FIXED_KEYS, resume_changes
from prl.config.schema import Config
from prl.control.ports import free_port
from prl.runfolder.logs import log_end
from prl.runfolder.manifest import newest_manifest
from prl.runfolder.outcome import Outcome, OutcomeError, read_outcome
from prl.runfolder.paths import RunFolder, run_of_attempt

BAD_INPUT = 2
FAILED = 1
CANCELLED = 130
KILLED = "the job's first process was killed before it could say why"
NOT_BEGUN = "the job ended before its first process began"
BATCH_LINES = 5  # of what a batch script said
LOCAL_HOST = "127.0.0.1"  # where the processes of a run without Slurm serve


def main(arguments: Sequence[str] | None = None) -> int:
    console.prepare()
    options = _parser().parse_args(arguments)
    try:
        with Interrupts() as interrupts:
            return _main(options, interrupts)
    except Cancelled:
        console.tell("prl-submit: cancelled; nothing was submitted")
        return CANCELLED
    except BrokenPipeError:
        if not (options.dry_run or options.options):
            raise
        return 0  # the reader has read enough
    finally:
        console.silence_broken()


def _main(options: argparse.Namespace, interrupts: Interrupts) -> int:
    if options.options:
        print(describe_options())
        return 0
    try:
        config, folder, attempt = _read(options)
        check_numbers(config)
        if options.dry_run:
            _show(config, make_split(config), folder, attempt)  # also where something is missing yet; what, is said below
        _check(config, resume=options.resume is not None)
        split = make_split(config)
        _check_memory(config, split)
        if options.dry_run:
            return 0
        if split.kind != "local":
            submission.script_for(config, split, folder, attempt)  # refuses options that cannot be, before anything is written
            check_slurm(config, split)
        print(f"run {config.run.name} in {folder}\n{split.describe()}", flush=True)  # as long as nothing is there to be undone
        return _submit(config, split, folder, attempt, options, interrupts)
    except ConfigError as error:
        console.refuse("prl-submit", *error.args)
        return BAD_INPUT
    except SlurmError as error:
        console.refuse("prl-submit", *str(error).splitlines())
        return BAD_INPUT
    except (SubmissionError, ProgramError, OutcomeError) as error:
        console.refuse("prl-submit", *str(error).splitlines())
        return FAILED
    except OSError as error:
        if options.dry_run and isinstance(error, BrokenPipeError):
            raise
        console.refuse("prl-submit", console.in_words(error))
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prl-submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="YAML file; `prl-submit --options` lists every key with its unit and default")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="Slurm nodes in all (default: cluster.nodes; null: this machine, without Slurm)"
    )
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="override keys, e.g. run.steps=20 run.seed=3"
    )
    parser.add_argument(
        "--resume", metavar="RUN", help="run folder to go on with, from its latest checkpoint and with its own configuration"
    )
    parser.add_argument(
        "--host-is-gone",
        action="store_true",
        help="with --resume: nothing of the run's latest attempt runs any more on the other machine on which it was started",
    )
    parser.add_argument(
        "--replay",
        metavar="RUN",
        help="run folder whose step files are trained on again, by trainers alone (needs streams.keep: all)",
    )
    parser.add_argument(
        "--replay-rollouts",
        action="store_true",
        help="with --replay: build the steps anew from RUN's rollouts, e.g. with another advantage",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and the batch script; write and send nothing")
    parser.add_argument("--wait", action="store_true", help="follow a Slurm job to its end (default: return after submission)")
    parser.add_argument("--options", action="store_true", help="list every configuration key with help and default")
    return parser


def _read(options: argparse.Namespace) -> tuple[Config, RunFolder, int]:
    """The configuration with all overrides and absolute paths, the run's folder, and the attempt that may be made there."""
    here, attempt = current_folder(), 1
    if options.host_is_gone and options.resume is None:
        raise ConfigError("--host-is-gone speaks of a run that is gone on with; name it with --resume RUN")
    if options.resume is not None:
        config, attempt = _read_resumed(options)
    elif options.config is None:
        raise ConfigError("name a configuration, e.g. configs/quickstart.yaml, or a run with --resume")
    else:
        config = load(options.config, options.set)
    if options.replay is not None:
        config = replace(config, run={"replay": str(Path(options.replay).absolute())})
    if options.replay_rollouts:
        if not config.run.replay:
            raise ConfigError("--replay-rollouts says what --replay RUN trains on; name that run too")
        config = replace(config, run={"replay_from": "rollouts"})
    if options.nodes is not None:
        config = replace(config, cluster={"nodes": options.nodes})
    config = resolve_paths(config, here)
    return config, RunFolder(config.run.folder), attempt


def _read_resumed(options: argparse.Namespace) -> tuple[Config, int]:
    """The configuration of the run that is gone on with, and its next attempt's number."""
    folder, named = RunFolder(Path(options.resume).absolute()), f"--resume {options.resume}"
    if options.replay is not None:
        raise ConfigError("--resume goes on with a run, --replay begins one; leave out one of them")
    if options.config is not None:
        raise ConfigError(f"--resume takes the configuration from the run itself; leave out {options.config}")
    whole = run_of_attempt(folder.path)
    if whole is not None:
        raise ConfigError(f"{named}: is one attempt of a run, and a run folder is wanted: --resume {shlex.quote(str(whole))}")
    if not folder.config.is_file():
        raise ConfigError(f"{named}: no run lies there (no {folder.config})")
    attempt = submission.next_attempt(folder)
    submission.check_not_running(folder, host_is_gone=options.host_is_gone)
    if not folder.manifests():
        raise ConfigError(
            f"{named}: the run has no finished checkpoint to go on from (no manifest.json under {folder.checkpoints}); submit "
            f"it anew, with train.checkpoint_every_steps set"
        )
    manifest, refused = newest_manifest(folder)
    for words in refused:
        console.tell(f"prl-submit: warning: {console.printable(words)}")
    if manifest is None:
        raise ConfigError(f"{named}: none of the run's checkpoints can be gone on from; submit it anew")
    before = load(folder.config)
    config = load(folder.config, options.set)
    fixed = resume_changes(before, config)
    if fixed:
        raise ConfigError(
            f"{named}: {', '.join(fixed)} cannot be changed in a run that has begun; begin a new one for that (what belongs to "
            f"the run for good: {', '.join(FIXED_KEYS)})"
        )
    step = manifest.step
    if step >= config.run.steps:
        raise ConfigError(
            f"{named}: run.steps = {config.run.steps} are trained, the newest checkpoint is that of step {step}; raise "
            f"run.steps: --set run.steps=N, with N above {step}"
        )
    return replace(config, run={"folder": str(folder)}), attempt


def _check(config: Config, *, resume: bool) -> None:
    """Raises ConfigError with every problem found; prints warnings."""
    from prl.domains.registry import domain_problems
    from prl.orchestrator.replay import replay_problems

    for warning in check(config, resume=resume):
        print(f"prl-submit: warning: {warning}", file=sys.stderr)
    problems = [*domain_problems(config), *(replay_problems(config) if config.run.replay else ())]
    if config.cluster.nodes is None:
        problems += _port_problems()
    if problems:
        raise ConfigError(*problems)


def _check_memory(config: Config, split: Split) -> None:
    """Raises ConfigError where a trainer rank needs more than its accelerator has, or a node's ranks more than the node; warns
    where an accelerator's is not known."""
    model, room_gib, gpus = model_of(config), config.cluster.gpu_memory_gib, config.cluster.gpus_per_node
    if model is None:
        return
    sent = gathered_bytes(config, model), kept_bytes(config, model)
    _, memory = fullest_rank(model, config.train, split.world_size, microbatch_tokens(config), *sent)
    if room_gib is None and gpus:
        console.tell(
            f"prl-submit: warning: cluster.gpu_memory_gib = null: whether an accelerator holds the {memory.total / 2**30:.1f} "
            f"GiB that a trainer rank needs is not checked; set it to an accelerator's memory"
        )
    if room_gib is not None and memory.total > room_gib * 2**30:
        raise ConfigError(
            f"cluster.gpu_memory_gib = {room_gib}: a trainer rank needs about {memory.total / 2**30:.1f}; raise "
            f"train.tensor_parallel or train.pipeline_parallel, set train.distributed_optimizer, train.optimizer_offload or "
            f"train.recompute, or lower "
            f"preprocess.pack_tokens; --dry-run shows the parts"
        )
    ranks = _ranks_of_a_node(split)
    saved = saved_on_a_node(model, config.train, split.world_size, ranks)
    _check_node_memory(config, split, ranks * (memory.on_the_host + (0 if gpus else memory.total)), saved)


def _ranks_of_a_node(split: Split) -> int:
    return max(component.node.trainer_ranks for component in split.components)


def _check_node_memory(config: Config, split: Split, held: int, saved: int) -> None:
    """What a node's trainer ranks hold, and copy for a checkpoint; a run on this machine's CPUs is checked with all else
    (`machine_problems`)."""
    has, who = config.cluster.memory_per_node_gib, f"cluster.memory_per_node_gib = {config.cluster.memory_per_node_gib}"
    if split.kind == "local":
        if not config.cluster.gpus_per_node:
            return
        has = free_memory_bytes() / 2**30
        who = f"this machine has {has:.1f} GiB of memory free"
    if has is not None and held + saved > has * 2**30:
        how = ", with train.optimizer_offload = true" if config.train.optimizer_offload else ""
        raise ConfigError(
            f"{who}: a node's {_ranks_of_a_node(split)} trainer ranks need about {size_in_words(held + saved)}{how}, "
            f"{size_in_words(saved)} of it for the copy that a checkpoint is written from; give it more, or fewer of them"
        )


def _port_problems() -> list[str]:
    """Every process of a local run that serves needs a port of this machine."""
    try:
        free_port(LOCAL_HOST)
    except OSError as error:
        return [f"{error.strerror}: end what holds the ports of this machine, or send the run to Slurm with --nodes"]
    return []


def _show(config: Config, split: Split, folder: RunFolder, attempt: int) -> None:
    print(f"run {config.run.name} in {folder}\n{split.describe()}")
    model = model_of(config)
    if model is not None and not any(layout_problems(config.train, model)):
        sent = gathered_bytes(config, model), kept_bytes(config, model)
        print(describe_memory(model, config.train, split.world_size, microbatch_tokens(config), *sent))
        saved = saved_on_a_node(model, config.train, split.world_size, _ranks_of_a_node(split))
        print(f"  a checkpoint is written from a copy of up to {size_in_words(saved)} in the memory of a node")
    if model is not None and not config.run.replay:
        print(describe_weights(model, config))
    if split.kind != "local":
        print(f"\nbatch script:\n{submission.script_for(config, split, folder, attempt)}")


def _submit(
    config: Config, split: Split, folder: RunFolder, attempt: int, options: argparse.Namespace, interrupts: Interrupts
) -> int:
    """Start the job and follow it or leave it to Slurm; the exit code. Whatever happens to this command between the start of
    a local job and its end, the job does not outlive it."""
    from prl.orchestrator.agent import run_node

    job: Submission | None = None
    try:
        resume = options.resume is not None
        with interrupts.held(), submission.undone_on_error(config, folder, attempt, resume=resume):
            interrupts.check()
            job = submission.submit(config, split, folder, attempt, run_node, str(folder), attempt)
        interrupts.check()
        _record_start(config, folder, attempt)
        if job.kind != "local" and not options.wait:
            return _leave(job)
        return _follow(job, config)
    except Cancelled as reason:
        if job is None:
            raise
        console.tell(f"\n{reason}: ending the run (up to {config.control.stop_s:g} s)")
        job.cancel(config.control.stop_s)
        if job.kind == "local":
            explain(job, CANCELLED, f"cancelled ({reason}) before the run could say anything")
        console.tell("cancelled")
        _tell_how_to_go_on(job.run)
        return CANCELLED
    except BaseException as error:
        if job is not None and job.kind != "local":
            console.tell(f"prl-submit: job {job.job_id} was submitted and is left as it is; its run is {job.run}")
        elif job is not None:  # nobody is left who could end it
            job.cancel(config.control.stop_s)
            explain(job, FAILED, f"prl-submit could not go on ({type(error).__name__}: {error}) and ended the run")
        raise


def _record_start(config: Config, folder: RunFolder, attempt: int) -> None:
    """When this command started, for whoever measures how long a run takes from there."""
    import psutil

    from prl.metrics import names
    from prl.metrics.events import MetricsWriter

    with MetricsWriter(folder.metrics, "submit", 0, attempt, flush_s=config.metrics.flush_s) as writer:
        writer.write({}, kind=names.PHASE, labels={"name": names.COMMAND}, time=psutil.Process().create_time())


def _follow(job: Submission, config: Config) -> int:
    """Show progress to the end; the run's exit code."""
    if job.kind != "local":
        print(f"job {job.job_id} submitted; waiting for it (Ctrl-C cancels it)", flush=True)
    outcome = follow(job.run, job.attempt, config, job.ended)
    left = job.end_rest(config.control.stop_s)  # a killed job leaves processes behind
    if left:
        console.tell(f"{KILLED}; it left {left} processes, which were ended")
    return _report(job, outcome or read_outcome(job.run.exit(job.attempt)))


def _report(job: Submission, outcome: Outcome | None) -> int:
    if outcome is not None and outcome.code == 0:
        print(f"{outcome.outcome}: {console.printable(outcome.cause)} (exit code 0)\nrun folder: {job.run}")
        return 0
    if outcome is None:
        said = _last_words(job)
        if job.kind == "local":
            explain(job, FAILED, said)
        ended, code = f"the run failed (job {job.job_id} is {job.state()}): {console.printable(said)}", FAILED
        log = f"see {job.job.paths.stderr}" if said == KILLED and job.job.paths.stderr.exists() else ""
    else:
        code, log = outcome.code or FAILED, outcome.log_end
        ended = f"{outcome.outcome}: {console.printable(outcome.cause)} (exit code {code})"
    console.tell("\n".join(filter(None, [ended, console.printable(log), f"logs: {job.run.logs(job.attempt)}"])))
    _tell_how_to_go_on(job.run)
    return code


def _last_words(job: Submission) -> str:
    """What is known of the end of a job that wrote no exit.json."""
    full = full_filesystem(job.run.path)
    traceback = job.traceback()
    if full or traceback:
        return full or (traceback or "").rstrip().splitlines()[-1]
    if job.kind == "local":
        return KILLED
    said = log_end(job.run.batch_log(job.attempt), BATCH_LINES)
    how = KILLED if job.run.plan(job.attempt).exists() else NOT_BEGUN
    return f"{how}; its batch script said ({job.run.batch_log(job.attempt)}):\n{said}" if said else how


def _tell_how_to_go_on(run: RunFolder) -> None:
    console.tell(f"run folder: {run}")
    if run.manifests():
        console.tell(f"go on with: prl-submit --resume {shlex.quote(str(run))}")


def _leave(job: Submission) -> int:
    run, logs, stop = (shlex.quote(str(path)) for path in (job.run, job.run.logs(job.attempt), job.run.stop))
    print(f"job {job.job_id} submitted; what to do next:")
    print(f"  squeue -j {job.job_id:<24} is it running?")
    print(f"  prl-report {run}   how does it learn?")
    print(f"  tail -F {logs}/*.log")
    print(f"  touch {stop}   end after the step in hand, with a checkpoint")
    print(f"  scancel {job.job_id:<23} end at once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
