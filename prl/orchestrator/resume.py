"""Where an attempt starts: afresh, or from the last finished checkpoint with the ledger and the step files behind it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prl.config.schema import Config
from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.events import LedgerEvent
from prl.orchestrator.binding import Resume
from prl.orchestrator.replay import replayed_steps
from prl.orchestrator.steps import StepEntry
from prl.runfolder.paths import RunFolder
from prl.streams.ledger import ledger_events, read_ledger
from prl.streams.steps import find_steps, read_step


class ResumeError(Exception):
    """What a run left behind does not fit together; the message says what to do."""


@dataclass(frozen=True)
class Start:
    resume: Resume
    forks: Mapping[int, int]  # lineage -> the step at which it left the one before
    dispatcher: Dispatcher
    waiting: Sequence[StepEntry]  # durable step files that are trained again as they are
    evaluations_reached: int
    reissued: Sequence[LedgerEvent]  # to be recorded before anything else


def find_start(run: RunFolder, config: Config) -> Start:
    """Read the newest manifest, if there is one. Raises ResumeError where it does not fit the ledger."""
    settings = dispatcher_settings(config)
    manifests = run.manifests()
    _check_ledgers(run)
    earlier = list(ledger_events(read_ledger(run.ledgers)))
    if not manifests:
        if earlier:
            raise ResumeError(f"{run}: this run has begun before and left no checkpoint to go on from; submit it anew")
        waiting = replayed_steps(config, 0) if config.run.replay else []
        return Start(Resume(0, 0, None), {}, Dispatcher(settings), waiting, 0, ())
    step, path = manifests[-1]
    manifest = json.loads(path.read_text())
    counted = int(manifest["dispatcher"]["events"])
    if len(earlier) < counted:
        raise ResumeError(f"{path} counts on {counted} rows of the ledger in {run.ledgers}, which has {len(earlier)}")
    dispatcher = Dispatcher(settings, manifest["dispatcher"])
    dispatcher.replay(earlier[counted:])
    lineage = _last_lineage(run) + 1
    forks = {int(key): int(value) for key, value in manifest["forks"].items()}
    forks |= dict.fromkeys(range(int(manifest["lineage"]) + 1, lineage + 1), step)  # also of attempts that left nothing
    waiting = replayed_steps(config, step) if config.run.replay else _steps_behind(run, step, earlier)
    if not config.run.replay:
        _check_trained_again(run, step, waiting, earlier[counted:])
    in_files = {rollout for entry in waiting for rollout in entry.trained}
    keep = {rollout.group for rollout in in_files}
    left_out = [e.rollout for e in earlier if e.kind == "issued" and e.rollout.group in keep and e.rollout not in in_files]
    events = dispatcher.discarded(left_out, "left out of a step file")
    events += dispatcher.reissue_outstanding("attempt ended", keep)
    resume = Resume(step, lineage, str(path.parent))
    return Start(resume, forks, dispatcher, waiting, int(manifest["evaluations_reached"]), events)


def dispatcher_settings(config: Config) -> DispatcherSettings:
    run = config.run
    return DispatcherSettings(
        weights={domain.name: domain.weight for domain in config.domains},
        steps=run.steps,
        groups_per_step=run.groups_per_step,
        rollouts_per_group=run.rollouts_per_group,
        mode=run.mode,
        max_lag=run.max_lag,
        steps_per_generation=run.steps_per_generation,
        seed=run.seed,
        epochs=run.epochs,
        group_deadline_s=run.group_deadline_s,
        max_waiting_bytes=None if run.max_waiting_mib is None else run.max_waiting_mib * 2**20,
        evaluate_every_steps=run.evaluate_every_steps,
        evaluate_problems=run.evaluate_problems,
    )


def _last_lineage(run: RunFolder) -> int:
    """The highest lineage that any attempt has used, also one that left no checkpoint."""
    lineages = [json.loads(run.plan(n).read_text())["lineage"] for n in run.attempts() if run.plan(n).exists()]
    return max(lineages, default=0)


def _check_ledgers(run: RunFolder) -> None:
    """Every attempt that has begun has a ledger; without one of them its rollout ids would be issued a second time."""
    for number in run.attempts():
        if run.orchestrator_url(number).exists() and not any(run.ledger(number).glob("ledger_*.frames")):
            raise ResumeError(
                f"{run}: attempt {number} has begun, and its ledger is not in {run.ledger(number)}: a shared filesystem may "
                f"show it late, then resume again in a minute; otherwise restore it"
            )


def _check_trained_again(run: RunFolder, step: int, waiting: Sequence[StepEntry], since: Iterable[LedgerEvent]) -> None:
    """What was trained behind the checkpoint can only be trained again from its step file: its rollouts have ended."""
    last = max((event.step for event in since if event.kind == "trained"), default=step)
    found = {int(entry.file["step"]) for entry in waiting}
    missing = [number for number in range(step + 1, last + 1) if number not in found]
    if missing:
        raise ResumeError(
            f"{run}: step {missing[0]} was trained behind the checkpoint of step {step}, and its file is not in {run.steps}: "
            f"restore it, or submit the run anew"
        )


def _steps_behind(run: RunFolder, step: int, events: Iterable[LedgerEvent]) -> list[StepEntry]:
    """Step files step+1, step+2, ... without a gap, up to the first one of which a rollout has ended otherwise."""
    ended = {event.rollout for event in events if event.kind in ("discarded", "issued_again")}
    found = find_steps(run.steps)
    waiting = []
    while (step := step + 1) in found:
        file = found[step]
        ids = read_step(file.path, file.bytes, file.checksum).rollout_ids()
        if not ended.isdisjoint(ids):
            break
        entry = {"step": step, "path": str(file.path.relative_to(run.path)), "bytes": file.bytes, "checksum": file.checksum}
        waiting.append(StepEntry(entry, ids))
    return waiting
