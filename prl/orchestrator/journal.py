"""What the orchestrator writes of a run while it goes on: phases, steps, versions and evaluations."""

import asyncio
from collections.abc import Mapping
from typing import Any

from prl.control.tasks import thread_to_its_end
from prl.flow.evaluations import Evaluation
from prl.flow.membership import Membership
from prl.metrics import names
from prl.metrics.events import MetricsWriter
from prl.metrics.options import MetricsOptions
from prl.metrics.tensorboard import TensorBoardSink
from prl.orchestrator.updates import Committed
from prl.runfolder.paths import RunFolder

TENSORBOARD_S = 5.0  # between two looks of the sink


class Journal:
    def __init__(self, run: RunFolder, attempt: int, options: MetricsOptions) -> None:
        self._metrics = MetricsWriter(run.metrics, "orchestrator", 0, attempt, flush_s=options.flush_s)
        self._tensorboard = TensorBoardSink(run.metrics, run.tensorboard, attempt) if options.tensorboard else None

    def phase(self, name: str) -> None:
        self._metrics.write({}, kind=names.PHASE, labels={"name": name})
        self._metrics.flush()

    def committed(self, committed: Committed) -> None:
        labels = {"version": str(committed.version), "digest": committed.digest}
        self._metrics.write(committed.values, step=committed.version.step, kind=names.WEIGHTS, labels=labels)

    def samplers_changed(self, membership: Membership, words: str) -> None:
        values = {
            names.SERVING: float(len(membership.serving)),
            names.RESTARTS: float(membership.restarts),
            names.SEEDED: float(membership.seeded),
            names.EPOCH: float(membership.epoch),
            **{f"{names.FENCED_PREFIX}{reason}": float(count) for reason, count in membership.reasons.items()},
        }
        self._metrics.write(values, kind=names.SAMPLERS, labels={"event": words.partition("\n")[0]})

    def restarted(self, restarts: int, words: str) -> None:
        """What happened to an actor, a verifier, a preprocessor or the trainer."""
        self._metrics.write(
            {names.PROCESS_RESTARTS: float(restarts)}, kind=names.PROCESSES, labels={"event": words.partition("\n")[0]}
        )

    def trained(self, step: int, train: Mapping[str, float], data: Mapping[str, float], latest: Committed | None) -> None:
        """A step's line: the trainer's values, the preprocessor's under data/, those of the last version that was committed."""
        weights = {} if latest is None else latest.values
        prefixed = {f"data/{name}": value for name, value in data.items()}
        self._metrics.write({**train, **prefixed, **weights}, step=step, kind=names.STEP)

    def evaluated(self, evaluation: Evaluation, body: Mapping[str, Any]) -> None:
        values = {f"eval/{name}": float(body[name]) for name in ("reward_mean", "reward_std", "problems", "output_tokens")}
        labels = {name: str(body[name]) for name in ("version_start", "version_end")}
        self._metrics.write(values, step=evaluation.step, kind=names.EVALUATION, labels={"domain": evaluation.domain, **labels})

    def checkpointed(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics.write(values, step=step, kind=names.CHECKPOINT)

    def save_failed(self, step: int, words: str, values: Mapping[str, float]) -> None:
        self._metrics.write(values, step=step, kind=names.SAVE_FAILED, labels={"error": words})

    async def feed_tensorboard(self) -> None:
        """Keep TensorBoard's file up to date, until cancelled."""
        while self._tensorboard is not None:
            await asyncio.sleep(TENSORBOARD_S)
            await thread_to_its_end(self._tensorboard.update)

    async def close(self) -> None:
        self._metrics.close()
        if self._tensorboard is not None:
            await thread_to_its_end(self._tensorboard.close)
