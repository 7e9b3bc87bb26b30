"""What depends on where an attempt starts: the dispatcher with the desks around it, and how the run comes to a good end."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prl.config.schema import Config
from prl.control.server import Bell, Handler
from prl.flow.ending import Reason
from prl.flow.evaluations import Evaluation
from prl.orchestrator.checkpoints import Checkpoints, Moment
from prl.orchestrator.journal import Journal
from prl.orchestrator.outcome import Ending
from prl.orchestrator.resume import Start
from prl.orchestrator.rollouts import Record, RolloutDesk
from prl.orchestrator.steps import StepDesk
from prl.orchestrator.stop_rule import Score, StopRule
from prl.orchestrator.updates import Committed
from prl.runfolder.paths import RunFolder


class Work:
    """Rollouts, steps, evaluations and checkpoints of one attempt from `start` on."""

    def __init__(
        self,
        start: Start,
        *,
        run: RunFolder,
        config: Config,
        attempt: int,
        journal: Journal,
        bell: Bell,
        record: Record,
        settled: Callable[[], Awaitable[None]],
        wants_version: Callable[[], bool],
        current: Callable[[], Committed | None],
        before: "Work | None" = None,
    ) -> None:
        """`record`, `settled`: of the ledger's desk; `wants_version`: see StepDesk; `current`: the
        version that the samplers carry; `before`: what the trainers had done that these have taken the place of."""
        self.start = start
        self.lineage = start.resume.lineage
        self.dispatcher = start.dispatcher
        self._all_trained = Ending(f"all {config.run.steps} steps trained")
        self.ending = self._all_trained
        self._config = config
        self._journal = journal
        self._bell = bell
        self._current = current
        self._stop_rule = StopRule(config.run.stop_at_reward, config.run.stop_after_evaluations, start.evaluations_reached)
        self.checkpoints: Checkpoints = Checkpoints(
            run,
            config,
            attempt,
            start,
            journal,
            now=self._moment,
            settled=settled,
            before=None if before is None else before.checkpoints,
        )
        self.rollouts: RolloutDesk = RolloutDesk(
            self.dispatcher,
            record,
            bell,
            on_evaluation=self._evaluated,
            on_announced=self.checkpoints.announced,
            cursors=None if before is None else before.rollouts.cursors(),
        )
        self.steps = StepDesk(
            self.dispatcher,
            self.rollouts,
            record,
            bell,
            trained=start.resume.step,
            forks=start.forks,
            lineage=start.resume.lineage,
            waiting=start.waiting,
            on_trained=self._trained,
            save_now=self.checkpoints.due,
            wants_version=wants_version,
            steps_at_once=config.preprocess.processes,
        )
        self.handlers: Mapping[str, Handler] = {
            **self.rollouts.handlers(),
            **self.steps.handlers(),
            **self.checkpoints.handlers(),
        }
        self._asked: Ending | None = None if before is None else before._asked  # how the run is to end, as soon as it may
        if self.steps.trained >= config.run.steps:
            self._asked = self._all_trained  # the checkpoint is the last: nothing but the export is left
        self._end_if_due()

    async def close(self) -> None:
        """Its trainers are gone, and others take it up again; returns once nothing of it goes on."""
        self.rollouts.open = False
        self.steps.close()
        await self.checkpoints.close()

    def finish(self, words: str, reason: Reason = "done") -> None:
        """End the run well after the step in hand, and after all that were trained before a rollback: else their rollouts would
        have no end. The first reason counts."""
        self._asked = self._asked or Ending(words, reason)
        self._end_if_due()

    def leave(self, words: str, reason: Reason) -> None:
        """Save after the step in hand, and end without anything that could as well be done later."""
        self.ending = self.ending if self.steps.finishing else Ending(words, reason)
        self.steps.finishing = self.steps.leaving = True
        self._bell.ring()

    def all_evaluated(self) -> bool:
        return not self.dispatcher.evaluations_pending

    def position(self) -> tuple[int, int, int, bool]:
        """Something that changes whenever a step or some groups have ended, or trainers begin again."""
        return self.lineage, self.steps.trained, self.rollouts.announced, self.dispatcher.used_up

    def _end_if_due(self) -> None:
        is_due = self.steps.trained >= self.dispatcher.furthest_trained
        if self._asked is not None and is_due and not self.steps.finishing:
            self.ending = self._asked
            self.steps.finishing = True
            self._bell.ring()

    def _trained(self, step: int, train: Mapping[str, float], data: Mapping[str, float]) -> bool:
        """Note a trained step; whether it was the last."""
        self._journal.trained(step, train, data, self._current())
        self._end_if_due()
        last = step >= self._config.run.steps
        if last:  # also where it was to leave: nothing but the export would be left for later
            self.ending, self.steps.leaving = self._all_trained, False
        return last

    def _evaluated(self, evaluation: Evaluation, body: Mapping[str, Any]) -> None:
        self._journal.evaluated(evaluation, body)
        self._stop_rule = self._stop_rule.scored(Score(evaluation.step, int(body["problems"]), float(body["reward_mean"])))
        self._stop_rule = self._stop_rule.closed(self.dispatcher.evaluating)
        if self._stop_rule.fulfilled:
            rule = self._stop_rule
            self.finish(f"held-out reward reached {rule.reward} in {rule.needed} evaluations in a row")

    def _moment(self) -> Moment:
        """What a checkpoint of the last trained step has to say of the run."""
        streams = {"rollouts": self.rollouts.cursors(), "steps": self.steps.next_step - 1}
        return Moment(self.steps.trained, self.dispatcher.state(), streams, self._stop_rule.reached)
