"""Live progress of a run, from what it writes: the metrics files and the attempt's exit.json."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from prl.cli import console
from prl.config.schema import Config
from prl.metrics import names
from prl.metrics.events import Event, EventFollower
from prl.runfolder.outcome import Outcome, read_outcome
from prl.runfolder.paths import RunFolder
from prl.runfolder.plan import PlanError, read_plan

LOOK_S = 0.25  # between two looks at the metrics
PLAIN_LINE_S = 5.0  # between two lines where the output is no terminal
LEADERS = ("orchestrator", "agent")  # what writes metrics every few seconds in rank 0's process, whatever the run does
LEAST_SILENCE_S = 6.0  # of theirs that is one
SILENT = "nothing was heard of the run's orchestrator for {seconds:.0f} s: it may be frozen, or its metrics do not get here"


@dataclass
class Progress:
    """The latest figures of an attempt."""

    steps: int
    may_end_early: bool = False  # by the reward reached, or as the problems are used up
    phase: str = "starting"
    step: int = 0
    begins_at: int = 0  # the step of the checkpoint that it goes on from
    reward: float | None = None
    held_out: float | None = None
    lag: float | None = None
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=20))  # (seconds, tokens) of each step
    _last_time: float | None = None

    def take(self, event: Event) -> None:
        values = event.values
        if event.kind == names.PHASE:
            name = event.labels.get("name", self.phase)
            self.phase = self.phase if name in (names.COMMAND, names.FIRST_ROLLOUT_REQUEST) else name
        elif event.kind == names.EVALUATION:
            self.held_out = values.get(names.EVAL_REWARD_MEAN, self.held_out)
        elif event.kind == names.STEP and event.step is not None and event.step > self.step:
            self.step = event.step
            self.reward = values.get(names.REWARD_MEAN, self.reward)
            self.lag = values.get(names.LAG_MEAN, self.lag)
            seconds = values.get(names.STEP_S, event.time - self._last_time if self._last_time is not None else 0.0)
            if seconds > 0:
                self.recent.append((seconds, values.get(names.TOKENS, 0.0)))
            self._last_time = event.time

    def line(self) -> str:
        if not self.step:
            return f"step {self.begins_at}/{self.steps}  {self.phase}" + self._figure("  held-out ", self.held_out, ".3f")
        seconds, tokens = sum(s for s, _ in self.recent), sum(t for _, t in self.recent)
        line = f"step {self.step}/{self.steps}"
        line += self._figure("  reward ", self.reward, ".3f") + self._figure("  held-out ", self.held_out, ".3f")
        line += self._figure("  lag ", self.lag, ".1f")
        if seconds:
            each = seconds / len(self.recent)
            line += f"  {tokens / seconds:,.0f} tokens/s  {each:.2f} s/step"
            line += f"  {'at most ' if self.may_end_early else ''}{_minutes(each * (self.steps - self.step))} left"
        return line

    @staticmethod
    def _figure(name: str, value: float | None, form: str) -> str:
        return "" if value is None else f"{name}{value:{form}}"


def follow(
    run: RunFolder,
    attempt: int,
    config: Config,
    ended: Callable[[float], bool],
    stream: TextIO = sys.stdout,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome | None:
    """Print the attempt's progress until its job has ended: one line that is written over on a terminal, else a line every
    few seconds. `ended(s)` waits up to s seconds for the job's end and says whether it came. Gives what exit.json says,
    None where the job ended without one. Raises OutcomeError."""
    follower, progress = EventFollower(run.metrics), Progress(config.run.steps, may_end_early(config))
    progress.begins_at = max((step for step, _ in run.manifests()), default=0)  # until its plan says it
    overwrite, last, last_at = stream.isatty(), "", float("-inf")
    heard: float | None = None  # of rank 0, on the clock
    planned, told = False, set[str]()
    while True:
        over = ended(LOOK_S)
        for event in follower.read():
            if event.attempt == attempt:
                progress.take(event)
                if event.kind == names.SAVE_FAILED:
                    words = f"warning: the checkpoint of step {event.step} failed, and the run goes on: "
                    words += console.printable(event.labels.get("error", ""))
                    stream.write(f"\r{words}\x1b[K\n" if overwrite else f"{words}\n")
                    last = ""
                if event.kind == names.SAMPLERS and any(name.startswith(names.FENCED_PREFIX) for name in event.values):
                    words = f"samplers: {console.printable(event.labels.get('event', ''))}"
                    stream.write(f"\r{words}\x1b[K\n" if overwrite else f"{words}\n")
                    last = ""
                if event.kind == names.PROCESSES:
                    words = f"processes: {console.printable(event.labels.get('event', ''))}"
                    stream.write(f"\r{words}\x1b[K\n" if overwrite else f"{words}\n")
                    last = ""
                if event.role in LEADERS and event.index == 0:
                    heard = clock()
        silent_s = 0.0 if heard is None else clock() - heard
        is_silent = silent_s >= max(config.control.lost_after_s, LEAST_SILENCE_S) and not over
        if is_silent and not run.exit(attempt).exists():  # the job may wait in the queue again
            heard = None  # said once, until there is something new
            words = f"{SILENT.format(seconds=silent_s)}; see {run.logs(attempt)}"
            stream.write(f"\r{words}\x1b[K\n" if overwrite else f"{words}\n")
            last = ""
        if not planned and run.plan(attempt).exists():
            planned = progress.phase != "starting"  # until then a checkpoint that is being checked may turn out damaged
            news = [words for words in _take_plan(run, attempt, progress) if words not in told]
            told.update(news)
            stream.writelines(f"warning: {console.printable(words)}\n" for words in news)
        line = progress.line()
        if line != last and (overwrite or over or clock() - last_at >= PLAIN_LINE_S):
            stream.write(f"\r{line}\x1b[K" if overwrite else f"{line}\n")
            stream.flush()
            last, last_at = line, clock()
        if over:
            if overwrite:
                stream.write("\n")
            return read_outcome(run.exit(attempt))


def may_end_early(config: Config) -> bool:
    """Whether something else than the number of steps may end the run."""
    return config.run.stop_at_reward is not None or config.run.epochs is not None


def _take_plan(run: RunFolder, attempt: int, progress: Progress) -> Sequence[str]:
    """Where the attempt begins; the checkpoints that it passed over."""
    try:
        plan = read_plan(run.plan(attempt))
    except PlanError as error:
        return [str(error)]
    progress.begins_at = plan.forks.get(plan.lineage, 0)
    return plan.refused


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
