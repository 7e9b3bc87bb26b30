"""What trainers and preprocessors leave on disk, written by hand: step files and checkpoints."""

import numpy as np

from prl.flow.ids import RolloutId
from prl.runfolder.manifest import Manifest, part_of, write_manifest
from prl.runfolder.paths import RunFolder
from prl.streams.files import StreamFile
from prl.streams.records import MicroBatch, StepFacts
from prl.streams.steps import write_step


def step_file(
    run: RunFolder,
    step: int,
    ids: list[RolloutId],
    sequence: int,
    writer: str = "r-1",
    attempt: int = 1,
    token: int = 15,
) -> StreamFile:
    """One micro-batch of two tokens a rollout."""
    tokens = 2 * len(ids)
    floats = np.ones(tokens, np.float32)
    microbatch = MicroBatch(
        tokens=np.full(tokens, token, np.int32),
        positions=np.tile(np.arange(2, dtype=np.int32), len(ids)),
        boundaries=np.arange(0, tokens + 1, 2, dtype=np.int32),
        loss_weights=floats,
        advantages=floats,
        old_logprobs=floats,
        reference_logprobs=None,
        lags=np.zeros(tokens, np.int32),
        rollouts=tuple(ids),
    )
    facts = StepFacts(step, float(tokens), tokens, len(ids), 1)
    return write_step(run.steps, [microbatch], facts, run=writer, attempt=attempt, sequence=sequence)


def write_checkpoint(run, step, state):
    folder = run.checkpoint(step)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer/__0_0.distcp").write_bytes(b"weights of %d" % step)
    (folder / "trainer/.metadata").write_bytes(b"metadata")
    parts = [part_of(folder, path) for path in sorted((folder / "trainer").iterdir())]
    facts = {"step": step, "attempt": 1, "lineage": 0, "forks": {}, "streams": {}, "evaluations_reached": 1}
    write_manifest(run, Manifest(**facts, dispatcher=state, parts=parts))
