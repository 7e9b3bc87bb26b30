"""By what a run goes on once an attempt of it has ended: Slurm's queue, or the jobs behind it in its chain."""

import contextlib
import sys
from collections.abc import Sequence

from prl.cluster.record import read_record
from prl.cluster.run import ProgramError
from prl.cluster.slurm import cancel_waiting, jobs_in_queue
from prl.config.load import ConfigError
from prl.config.schema import Config
from prl.flow.ending import Means
from prl.runfolder.paths import RunFolder


def means_of(run: RunFolder, attempt: int, config: Config) -> Means:
    """Of an attempt under Slurm. Where the queue cannot be asked here, all jobs of the chain are taken for waiting."""
    followers: Sequence[str] = ()
    try:
        followers = read_record(run, attempt).followers
        waiting = len(jobs_in_queue(followers))
    except (ConfigError, ProgramError) as error:  # the outcome is written all the same
        _say(f"jobs of the chain that are taken for waiting: {', '.join(followers) or 'none'}: {error}")
        waiting = len(followers)
    return Means(config.cluster.requeue, waiting, config.cluster.fruitless_attempts)


def dismiss_followers(run: RunFolder, attempt: int) -> None:
    """The jobs behind this one in its chain would wait for all of their nodes, only to find that nothing is left to do. Where
    Slurm cannot be told here, they do."""
    try:
        followers = read_record(run, attempt).followers
        if followers:
            cancel_waiting(followers)
    except (ConfigError, ProgramError) as error:
        _say(f"the jobs that follow in the chain are left to find out that the run has ended: {error}")


def _say(words: str) -> None:
    with contextlib.suppress(OSError):  # a log that takes nothing must not keep the end from being told
        print(f"prl: {words}", file=sys.stderr, flush=True)
