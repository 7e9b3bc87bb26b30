"""How far the attempts of a run came, by what they have recorded."""

import logging

from prl.metrics import names
from prl.metrics.events import read_events
from prl.runfolder.outcome import OutcomeError, read_outcome
from prl.runfolder.paths import RunFolder

log = logging.getLogger(__name__)


def last_step(run: RunFolder, attempt: int) -> int:
    """The last step that an attempt, or one before it, has recorded; 0 without one, also where the record cannot be read, which
    is logged: whoever asks has an end to explain."""
    path = run.orchestrator_metrics
    try:
        events = read_events(path)[0]
    except OSError as error:
        log.warning("%s: how far the run came is not known: %s", path, error)
        return 0
    return max((event.step or 0 for event in events if event.kind == names.STEP and event.attempt <= attempt), default=0)


def steps_before(run: RunFolder, attempt: int) -> list[int]:
    """The last step that each attempt before this one trained: by its word, or where it left none, by its record. Saved or
    not: who was killed twice between two checkpoints is no run that gets nowhere."""
    return [_steps_said(run, number) for number in run.attempts() if number < attempt]


def _steps_said(run: RunFolder, attempt: int) -> int:
    try:
        outcome = read_outcome(run.exit(attempt))
    except OutcomeError:
        outcome = None
    return last_step(run, attempt) if outcome is None else outcome.steps or 0
