"""What must hold of the metrics of any trainer's steps."""

import re
from collections.abc import Iterable, Mapping

from prl.metrics import names

PHASES = {
    *(names.WAIT_S, names.SEND_S, names.SAVE_S, names.DATA_S),
    *(names.REFERENCE_S, names.PROXIMAL_S, names.FORWARD_BACKWARD_S, names.OPTIMIZER_S),
}


def undocumented(keys: Iterable[str]) -> list[str]:
    """Those of train/ that `prl.metrics.names` does not describe."""
    text = names.__doc__.split("\ntrain/ ")[1].split("\ndata/ ")[0]
    found = re.findall(r"^ {4}(\S+(?:, \S+)*)(?: {2}|$)", text, re.MULTILINE)
    described = [re.sub("<.*>", ".+", name) for line in found for name in line.split(", ")]
    return [key for key in keys if not any(re.fullmatch(f"train/{name}", key) for name in described)]


def other_time_s(metrics: Mapping[str, float]) -> float:
    """What a step took beside its phases, none of which took less than no time."""
    assert {key for key in metrics if key.endswith("_s")} <= PHASES | {names.STEP_S}
    phases = {key: metrics[key] for key in PHASES & metrics.keys()}
    assert min(phases.values()) >= 0, phases
    return metrics[names.STEP_S] - sum(phases.values())
