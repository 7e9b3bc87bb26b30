"""prl-submit CONFIG: check a configuration, write the run folder, send the job.

prl-submit configs/quickstart.yaml               this machine, with live progress
prl-submit configs/quickstart.yaml --nodes 3     one heterogeneous Slurm job; with --follow its progress, too
prl-submit configs/quickstart.yaml --nodes 3 --chain 4
                                                 four of them, each going on where the time limit of the one before it was near
prl-submit configs/qwen7b.yaml --test-only       when Slurm would start it
prl-submit --status runs/quickstart              what its job is doing; --cancel ends it
prl-submit --resume runs/quickstart              go on from the latest checkpoint
prl-submit configs/quickstart.yaml --replay runs/quickstart --set run.folder=runs/again run.steps=10
                                                 train on that run's step files, without samplers
"""

import argparse
import shutil
import sys
from collections.abc import Sequence

from prl.cli import console
from prl.cli.cluster_arguments import add_cluster_arguments
from prl.cli.command_line import parse
from prl.cli.ending import explain
from prl.cli.expected import show_expected
from prl.cli.fit import memory_problems, show_plan, show_scripts
from prl.cli.interrupts import Cancelled, Interrupts
from prl.cli.job_end import FAILED, follow_job, tell_how_to_go_on, tell_next_steps
from prl.cli.options_text import describe_options
from prl.cli.read_config import read_config
from prl.cli.runs import cancel, leave_running, show_status
from prl.cluster import submission
from prl.cluster.claims import SubmissionError, undone_on_error
from prl.cluster.requests import request_problems, requests
from prl.cluster.run import ProgramError
from prl.cluster.slurm import SlurmError, check_slurm
from prl.cluster.split import Split, make_split, settle_mode
from prl.cluster.submission import Submission
from prl.config.checks import check, check_numbers
from prl.config.load import ConfigError
from prl.config.model_checks import model_of
from prl.config.paths import check_named
from prl.config.schema import Config
from prl.config.staging import settle_staging
from prl.control.ports import free_port
from prl.runfolder.outcome import OutcomeError
from prl.runfolder.paths import RunFolder
from prl.runfolder.sharing import file_modes

BAD_INPUT = 2
CANCELLED = 130
LOCAL_HOST = "127.0.0.1"  # where the processes of a run without Slurm serve


def main(arguments: Sequence[str] | None = None) -> int:
    console.prepare()
    options = _parse(arguments)
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
        for name in ("resume", "replay", "status", "cancel"):
            if (path := getattr(options, name)) is not None:
                check_named(f"--{name}", path)
        if options.cancel is not None:
            return cancel(options.cancel)
        if options.status is not None:
            return show_status(options.status, interrupts.check if options.follow else None)
        return _run(options, interrupts)
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


def _run(options: argparse.Namespace, interrupts: Interrupts) -> int:
    config, folder, attempt = read_config(options)
    check_numbers(config)
    config = _settled(config, insists=options.nodes is not None)
    config = settle_staging(config, model_of(config))
    split = make_split(config)
    refused = [*request_problems(config, split)]
    if options.dry_run:  # what has to be looked at is last, and so on the screen: the plan, then what is missing yet
        if not refused:
            show_scripts(config, split, folder, attempt)
        show_plan(config, split, folder)
        sys.stdout.flush()
    problems = [*refused, *_problems(config, resume=options.resume is not None)]
    if not refused:
        problems += memory_problems(config, split)
    if problems:
        raise ConfigError(*problems)
    if options.dry_run:
        return 0
    if split.kind != "local":
        check_slurm(requests(config, split))
    if options.test_only:
        show_expected(config, split, folder, attempt)
        return 0
    print(f"run {config.run.name} in {folder}\n{split.describe()}", flush=True)  # as long as nothing is there to be undone
    with file_modes(config.run.share):
        return _submit(config, split, folder, attempt, options, interrupts)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Keys behind the configuration are set as those of --set are, which come last and win. A run that is gone on with has no
    other configuration to be named."""
    options = parse(_parser(), arguments, sbatch=True)
    if options.resume is not None and options.config is not None and "=" in options.config:
        options.keys.insert(0, options.config)
        options.config = None
    options.set = [*options.keys, *options.set]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prl-submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="YAML file; `prl-submit --options` lists every key with its unit and default")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys to override, as with --set")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="override keys, e.g. run.steps=20 run.seed=3; '${oc.env:NAME}' in a value is a variable of the environment, while "
        "${KEY}, another key that the file sets, is for the file alone",
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
    parser.add_argument(
        "--follow",
        action="store_true",
        help="show a Slurm job's progress to its end, after the submission or with --status; Ctrl-C leaves the job running",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true", help="print the batch script, the plan and what is missing; write and send nothing"
    )
    instead.add_argument(
        "--test-only", action="store_true", help="ask Slurm when it would start the job, and each component; send nothing"
    )
    instead.add_argument("--status", metavar="RUN", help="what the job of a run is doing")
    instead.add_argument("--cancel", metavar="RUN", help="end the job of a run")
    instead.add_argument("--options", action="store_true", help="list every configuration key with help and default")
    add_cluster_arguments(parser)
    return parser


def _settled(config: Config, *, insists: bool) -> Config:
    """Where it is run, told where that is not what the configuration says. Who `insists` on Slurm is not given this machine."""
    settled = settle_mode(config, has_sbatch=insists or shutil.which("sbatch") is not None)
    if config.cluster.mode == "auto" and settled != config:
        console.tell(
            f"prl-submit: warning: cluster.nodes = {config.cluster.nodes}: there is no sbatch here, so that the run uses this "
            f"machine alone; --nodes N, or cluster.mode: het or plain, insists on Slurm"
        )
    return settled


def _problems(config: Config, *, resume: bool) -> list[str]:
    """Every problem found; prints warnings."""
    from prl.domains.registry import domain_problems

    try:
        warnings = check(config, resume=resume)
    except ConfigError as error:
        return [*error.args]
    for warning in warnings:
        print(f"prl-submit: warning: {warning}", file=sys.stderr)
    problems = list(domain_problems(config))
    if config.run.replay:
        from prl.orchestrator.replay import replay_problems  # a quarter of a second that no other run needs

        problems += replay_problems(config)
    if config.cluster.nodes is None:
        problems += _port_problems()
    return problems


def _port_problems() -> list[str]:
    """Every process of a local run that serves needs a port of this machine."""
    try:
        free_port(LOCAL_HOST)
    except OSError as error:
        return [f"{error.strerror}: end what holds the ports of this machine, or send the run to Slurm with --nodes"]
    return []


def _submit(
    config: Config, split: Split, folder: RunFolder, attempt: int, options: argparse.Namespace, interrupts: Interrupts
) -> int:
    """Start the job and follow it or leave it to Slurm; the exit code. Whatever happens to this command between the start of
    a local job and its end, the job does not outlive it."""
    from prl.orchestrator.agent import run_node

    job: Submission | None = None
    told = False
    try:
        resume = options.resume is not None
        with interrupts.held():
            with undone_on_error(config, folder, attempt, resume=resume):
                interrupts.check()
                job = submission.submit(config, split, folder, attempt, run_node, str(folder))
            _record_start(config, folder, attempt)
        interrupts.check()
        if job.kind != "local":
            tell_next_steps(job)
            told = True
        return follow_job(job, config, interrupts.check) if job.kind == "local" or options.follow else 0
    except Cancelled as reason:
        interrupts.heed()
        if job is None:
            raise
        if told:
            return leave_running(job.run, reason)
        console.tell(f"\n{reason}: ending the run (up to {config.control.stop_s:g} s)")
        job.cancel(config.control.stop_s)
        if job.kind == "local":
            explain(job, CANCELLED, f"cancelled ({reason}) before the run could say anything")
        console.tell("cancelled")
        tell_how_to_go_on(job.run)
        return CANCELLED
    except BaseException as error:
        if job is not None and job.kind != "local":
            jobs = " ".join((job.job_id, *job.followers))
            console.tell(f"prl-submit: job {jobs} was submitted and is left as it is; its run is {job.run}")
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


if __name__ == "__main__":
    sys.exit(main())
