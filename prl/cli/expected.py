"""When Slurm would start a job, as it estimates now."""

from datetime import datetime, timedelta

from prl.cluster.requests import requests
from prl.cluster.script import directives, render
from prl.cluster.slurm import SlurmError, advice, expected_start
from prl.cluster.slurm_output import Expected
from prl.cluster.split import Split
from prl.config.load import ConfigError
from prl.config.schema import Config
from prl.runfolder.paths import RunFolder

UNFORESEEABLE = timedelta(days=365)  # a job without a time limit lets Slurm reckon with a century


def show_expected(config: Config, split: Split, folder: RunFolder, attempt: int) -> None:
    """Print the expected start of the job, and of each component alone: what holds the job up is the one that would start
    late. Raises ConfigError for a run without Slurm, SlurmError with what Slurm says where it would refuse the job, and
    ProgramError."""
    if split.kind == "local":
        raise ConfigError("--test-only asks Slurm, and this run does without; ask for nodes with --nodes N")
    job = expected_start(render(config, split, folder, attempt))
    if job.refusal:
        raise SlurmError(f"Slurm would refuse the job: {job.refusal}{advice(job.refusal)}")
    print("expected starts, as the scheduler estimates them now; they move with every job that comes or goes:")
    print(f"  {'the job':<13}{_words(job)}")
    if split.kind == "het":
        for request in requests(config, split):
            alone = expected_start(f"#!/bin/bash\n{directives(request)}\n:\n")
            print(f"  {f'{request.component} alone':<13}{_words(alone)}")


def _words(expected: Expected) -> str:
    if expected.start is None:
        return f"not to be had: {expected.refusal}"
    if expected.start - datetime.now() > UNFORESEEABLE:
        return "not to be foreseen: jobs without a time limit, or held ones, are in the way"
    return f"{expected.start:%Y-%m-%d %H:%M:%S} on {expected.nodes}"
