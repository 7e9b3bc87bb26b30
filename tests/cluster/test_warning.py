"""How long before its time limit a job is warned."""

import json

import pytest

from prl.cluster.options import ClusterOptions
from prl.cluster.warning import lead_s, measured_lead_s
from prl.runfolder.paths import RunFolder


@pytest.mark.parametrize(
    ("least", "time_min", "steps_s", "saves_s", "seconds"),
    [
        (120, 60, [], [], 120),  # nothing is known yet
        (120, 60, [3.0, 4.5], [10.0], 120),
        (120, 60, [30.0, 80.2], [40.0, 20.0], 241),  # 2 * (80.2 + 40)
        (120, 60, [500.0, *[1.0] * 50], [], 120),  # so long ago that it counts no more
        (120, 2, [80.0], [40.0], 60),  # half the limit
        (65000, 10**6, [10**6], [], 65535),
    ],
)
def test_it_is_what_a_step_and_a_save_take_twice_within_bounds(least, time_min, steps_s, saves_s, seconds):
    assert lead_s(ClusterOptions(warning_s=least, time_min=time_min), steps_s, saves_s) == seconds


def test_what_steps_and_checkpoints_took_is_read_from_the_run(tmp_path):
    run, options = RunFolder(tmp_path), ClusterOptions(warning_s=10)
    assert measured_lead_s(options, run) == 10
    run.metrics.mkdir()
    head = {"time": 1.0, "role": "orchestrator", "index": 0, "attempt": 1, "step": 1}
    events = [("step", {"train/step_s": 20.0}), ("checkpoint", {"checkpoint/write_s": 30.0}), ("phase", {})]
    lines = [json.dumps({**head, "kind": kind, "values": values}) + "\n" for kind, values in events]
    (run.metrics / "orchestrator-0.jsonl").write_text("".join(lines))
    assert measured_lead_s(options, run) == 100
