"""Runs whose processes a test strikes while they go on."""

import subprocess
import time

from whole_runs import Ended

from prl.runfolder.paths import RunFolder

SHORT = ["configs/quickstart.yaml", "--set", "run.evaluate_every_steps=0", "run.stop_at_reward=null", "verifier.processes=1"]


def wait_for_checkpoint(process: subprocess.Popen, folder: RunFolder) -> int:
    """Its step; the samplers have had that version, too."""
    running, end = Ended(folder, 0, ""), time.monotonic() + 120
    while not (kept := folder.manifests()) or kept[-1][0] not in {event.step for event in running.events("weights")}:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "no checkpoint within 120 s"
        time.sleep(0.2)
    return kept[-1][0]


def wait_for_steps(process: subprocess.Popen, folder: RunFolder, steps: int) -> None:
    running, end = Ended(folder, 0, ""), time.monotonic() + 240
    while not any(event.step >= steps for event in running.events("step")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"no {steps} steps within 240 s"
        time.sleep(0.2)


def wait_for_lineage(process: subprocess.Popen, folder: RunFolder, lineage: int) -> None:
    """Until the samplers serve a version of it."""
    running, end = Ended(folder, 0, ""), time.monotonic() + 240
    while not any(event.labels["version"].startswith(f"{lineage}:") for event in running.events("weights")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"no version of lineage {lineage} within 240 s"
        time.sleep(0.2)


def served_after(folder: RunFolder, replica: int, since: float) -> set[int]:
    """The steps of the versions of the tokens that a replica sampled for requests after that time."""
    turns = [turn for group in Ended(folder, 0, "").groups() for rollout in group.rollouts for turn in rollout.turns]
    return {span.version.step for t in turns if t.replica == replica and t.started > since for span in t.versions}
