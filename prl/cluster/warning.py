"""How long before a job's time limit Slurm is to warn it: long enough for the step in hand and a checkpoint of it."""

import math
from collections.abc import Sequence

from prl.cluster.options import ClusterOptions
from prl.metrics import names
from prl.metrics.events import read_events
from prl.runfolder.paths import RunFolder

MARGIN = 2.0  # times what they took
LAST = 50  # steps and checkpoints that are looked at: the model may have been another one before
MOST_S = 65535  # that Slurm takes


def lead_s(options: ClusterOptions, steps_s: Sequence[float], saves_s: Sequence[float]) -> int:
    """Whole seconds, from what steps and checkpoints have taken: cluster.warning_s at least, half the time limit at most."""
    took_s = max(steps_s[-LAST:], default=0.0) + max(saves_s[-LAST:], default=0.0)
    return min(max(options.warning_s, math.ceil(MARGIN * took_s)), 30 * options.time_min, MOST_S)


def measured_lead_s(options: ClusterOptions, run: RunFolder) -> int:
    """The same by what earlier attempts of a run have measured, if there were any."""
    path = run.orchestrator_metrics
    events = read_events(path)[0] if path.is_file() else []
    steps_s = [event.values[names.STEP_S] for event in events if event.kind == names.STEP and names.STEP_S in event.values]
    saves_s = [event.values[names.CHECKPOINT_WRITE_S] for event in events if event.kind == names.CHECKPOINT]
    return lead_s(options, steps_s, saves_s)
