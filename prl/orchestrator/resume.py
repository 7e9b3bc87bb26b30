"""Where an attempt starts, and its trainers where they are started again: afresh, or from the last finished checkpoint with
the ledger and the step files behind it."""

import logging
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from prl.config.hf_config import UnsupportedModelError, read_model_config
from prl.config.schema import Config
from prl.flow.dispatcher import Dispatcher, DispatcherSettings
from prl.flow.events import EventKind, LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.problems import DispatcherError
from prl.flow.versions import Version, is_ancestor
from prl.orchestrator.binding import Plan
from prl.orchestrator.replay import replayed_steps
from prl.orchestrator.steps import StepEntry
from prl.runfolder.manifest import GoOn, Manifest, ManifestError, always, check_parts, newest_manifest, read_manifest
from prl.runfolder.paths import RunFolder
from prl.runfolder.plan import PlanError, PlanFacts, read_plan
from prl.runfolder.publish import publish_json
from prl.runfolder.reclaim import move_aside
from prl.streams.files import StreamError, StreamFile
from prl.streams.ledger import ledger_events, read_ledger
from prl.streams.steps import all_steps, read_own

log = logging.getLogger(__name__)


class ResumeError(Exception):
    """What a run left behind does not fit together; the message says what to do."""


@dataclass(frozen=True)
class Resume:
    """Where trainers begin: at a finished checkpoint, in a new lineage, or at the model's own weights."""

    step: int
    lineage: int
    checkpoint: str | None  # folder; None: from the model's own weights


@dataclass(frozen=True)
class Remains:
    """What a trainer goes on from: a whole checkpoint, or the model, and the durable step files behind it."""

    resume: Resume
    forks: Mapping[int, int]  # lineage -> the step at which it left the one before
    waiting: Sequence[StepEntry]  # step files that are trained again as they are
    left_out: Sequence[RolloutId]  # of their groups, but of no step file
    evaluations_reached: int
    refused: Sequence[str]  # newer checkpoints and step files that are damaged or foreign, and how


@dataclass(frozen=True)
class Start:
    resume: Resume
    forks: Mapping[int, int]
    dispatcher: Dispatcher
    waiting: Sequence[StepEntry]
    evaluations_reached: int
    reissued: Sequence[LedgerEvent]  # to be recorded before anything else
    refused: Sequence[str] = ()


def find_start(
    run: RunFolder, config: Config, *, parts: bool = True, lineage: int | None = None, go_on: GoOn = always
) -> Start:
    """Where the newest whole checkpoint, if there is one, and what lies behind it lead a new attempt. Checkpoints that are
    damaged are passed over with a word. Without `parts` only the sizes of a checkpoint's files are looked at, and
    `checked_start` has to follow. `lineage` is the attempt's, where it has one already. Raises ResumeError where none is whole,
    or the files do not fit together."""
    settings = dispatcher_settings(config)
    manifest, refused = _newest(run, parts=parts, go_on=go_on)
    _check_ledgers(run)
    earlier = read_ledger(run.ledgers)  # as columns: of all attempts it may be tens of millions of rows
    if manifest is None:
        if len(earlier):
            raise ResumeError(f"{run}: this run has begun before and left no checkpoint to go on from; submit it anew")
        waiting = replayed_steps(config, 0) if config.run.replay else []
        return Start(Resume(0, 0, None), {}, Dispatcher(settings), waiting, 0, ())
    path = run.manifest(manifest.step)
    if len(earlier) < manifest.events:
        raise ResumeError(f"{path} counts on {manifest.events} rows of the ledger in {run.ledgers}, which has {len(earlier)}")
    try:
        dispatcher = Dispatcher(settings, manifest.dispatcher)
        dispatcher.replay(ledger_events(earlier.slice(manifest.events)))
    except (DispatcherError, StreamError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ResumeError(
            f"{path}: its state and the ledger in {run.ledgers} do not fit together ({type(error).__name__}: {error}): they "
            f"were written by another version of prl, or belong to different runs; submit the run anew"
        ) from error
    if lineage is None:
        plan = _last_plan(run)
        lineage = 1 if plan is None else plan.lineage + 1
    remains = _behind(run, config, manifest, refused, earlier, lineage, go_on)
    return go_back(remains, dispatcher, "attempt ended")


def find_remains(run: RunFolder, config: Config, lineage: int, go_on: GoOn = always) -> Remains:
    """Where the newest whole checkpoint, or without any the model, and what lies behind it lead new trainers of the attempt
    that goes on. All that the ledger is to say has to be durable. Raises ResumeError."""
    manifest, refused = _newest(run, parts=True, go_on=go_on)
    return _behind(run, config, manifest, refused, read_ledger(run.ledgers), lineage, go_on)


def go_back(remains: Remains, dispatcher: Dispatcher, reason: str) -> Start:
    """With a dispatcher that knows of all that the ledger says; `reason` is why what is in flight is issued again."""
    in_files = {rollout.group for entry in remains.waiting for rollout in entry.trained}
    left_out = [*remains.left_out, *dispatcher.overtaken(in_files)]
    events = dispatcher.discarded(left_out, "left out of a step file")
    events += dispatcher.went_back(Version(remains.resume.lineage, remains.resume.step), reason, in_files)
    return Start(
        remains.resume, remains.forks, dispatcher, remains.waiting, remains.evaluations_reached, events, remains.refused
    )


def _newest(run: RunFolder, *, parts: bool, go_on: GoOn) -> tuple[Manifest | None, list[str]]:
    """One that was taken for damaged once, and that the run has gone back behind, is not taken again: what was trained since
    would be lost."""
    plan = _last_plan(run)

    def survives(manifest: Manifest) -> bool:
        return plan is None or is_ancestor(Version(manifest.lineage, manifest.step), plan.lineage, plan.forks)

    manifest, refused = newest_manifest(run, parts=parts, survives=survives, go_on=go_on)
    for words in refused:
        log.error("%s", words)
    if manifest is None and refused:
        raise ResumeError(f"{run}: no checkpoint is whole; restore one, or submit the run anew. {'; '.join(refused)}")
    return manifest, refused


def _behind(
    run: RunFolder,
    config: Config,
    manifest: Manifest | None,
    refused: Sequence[str],
    earlier: pa.Table,
    lineage: int,
    go_on: GoOn,
) -> Remains:
    """`earlier` is the ledger."""
    step, left, forks = (0, 0, {}) if manifest is None else (manifest.step, manifest.lineage, dict(manifest.forks))
    forks |= dict.fromkeys(range(left + 1, lineage + 1), step)  # also of attempts and trainers that left nothing
    told: list[str] = []
    if config.run.replay:
        waiting = replayed_steps(config, step)
    else:
        trained = _trained_behind(earlier, step)
        waiting, told = _steps_behind(run, config.run.mark, step, earlier, trained, go_on)
        _check_trained_again(run, step, waiting, max(trained, default=step), refused)
    in_files = {rollout for entry in waiting for rollout in entry.trained}
    issued = _events_of(earlier, {rollout.group for rollout in in_files}, {"issued"})
    return Remains(
        Resume(step, lineage, None if manifest is None else str(run.checkpoint(step))),
        forks,
        waiting,
        [event.rollout for event in issued if event.rollout not in in_files],
        0 if manifest is None else manifest.evaluations_reached,
        [*refused, *told],
    )


def checked_start(run: RunFolder, config: Config, start: Start, go_on: GoOn) -> Start:
    """The same start, now that every byte of its checkpoint was read and is what was written; or another one of this attempt,
    from an older checkpoint that is whole. Raises ResumeError."""
    if start.resume.checkpoint is None:
        return start
    path = run.manifest(start.resume.step)
    try:
        check_parts(path, read_manifest(path), go_on=go_on)
        return start
    except ManifestError:
        older = find_start(run, config, lineage=start.resume.lineage, go_on=go_on)
        told = [words for words in start.refused if words not in older.refused]  # of step files that were set aside at once
        return replace(older, refused=[*older.refused, *told])


def publish_plan(run: RunFolder, plan: Plan, start: Start) -> None:
    facts = {"lineage": start.resume.lineage, "forks": start.forks, "refused": start.refused}
    publish_json(run.plan(plan.attempt), {**plan.to_json(), **facts})


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
        order=run.order,
        seed=run.seed,
        epochs=run.epochs,
        group_deadline_s=run.group_deadline_s,
        max_waiting_bytes=None if run.max_waiting_mib is None else run.max_waiting_mib * 2**20,
        evaluate_every_steps=run.evaluate_every_steps,
        evaluate_problems=run.evaluate_problems,
    )


def _last_plan(run: RunFolder) -> PlanFacts | None:
    """That of the highest lineage that any attempt has used, also one that left no checkpoint."""
    try:
        plans = (read_plan(run.plan(n)) for n in run.attempts() if os.path.lexists(run.plan(n)))
        last = max(plans, key=lambda plan: plan.lineage, default=None)
    except PlanError as error:
        raise ResumeError(str(error)) from error
    if last is not None and not last.forks.keys() >= set(range(1, last.lineage + 1)):
        raise ResumeError(f"{run}: no plan.json says where lineages 1 to {last.lineage} left the ones before: restore it")
    return last


def _check_ledgers(run: RunFolder) -> None:
    """Every attempt that has begun has a ledger; without one of them its rollout ids would be issued a second time."""
    for number in run.attempts():
        if run.orchestrator_url(number).exists() and not any(run.ledger(number).glob("ledger_*.frames")):
            raise ResumeError(
                f"{run}: attempt {number} has begun, and its ledger is not in {run.ledger(number)}: a shared filesystem may "
                f"show it late, then resume again in a minute; otherwise restore it"
            )


def _check_trained_again(
    run: RunFolder, step: int, waiting: Sequence[StepEntry], last_trained: int, refused: Sequence[str]
) -> None:
    """What was trained behind the checkpoint can only be trained again from its step file: its rollouts have ended."""
    found = {int(entry.file["step"]) for entry in waiting}
    missing = [number for number in range(step + 1, last_trained + 1) if number not in found]
    if missing:
        why = f" (older than the newest, since {'; '.join(refused)})" if refused else ""
        raise ResumeError(
            f"{run}: step {missing[0]} was trained behind the checkpoint of step {step}{why}, and its file is not in "
            f"{run.steps}: restore it, or submit the run anew"
        )


def _steps_behind(
    run: RunFolder, name: str, step: int, earlier: pa.Table, trained: Mapping[int, Set[RolloutId]], go_on: GoOn
) -> tuple[list[StepEntry], list[str]]:
    """Step files step+1, step+2, ... without a gap, up to the first one of which a rollout has ended otherwise. Files that are
    damaged, or that the run of this name has not written with its model, are set aside and told (the second answer) where
    another one of the step is sound, or nobody has trained it, so that it is made anew. So are those beside the one that a step
    was trained from: a preprocessor that died may have left one that it never announced."""
    found, last = all_steps(run.steps), max(trained, default=step)
    newest = max(run.attempts(), default=0)
    vocabulary = _vocabulary(run) if step + 1 in found else None
    entries, told = [], []
    while (step := step + 1) in found:
        useless: dict[StreamFile, StreamError] = {}
        for file in found[step]:
            go_on()
            try:
                data = read_own(file, run=name, step=step, newest_attempt=newest, vocabulary=vocabulary)
                ids = data.rollout_ids()
                _check_issued(file.path, ids, earlier)
                _check_trained(file.path, ids, trained.get(step))
            except StreamError as error:
                useless[file] = error
                continue
            path = str(file.path.relative_to(run.path))
            entries.append(StepEntry({"step": step, "path": path, "bytes": file.bytes, "checksum": file.checksum}, ids))
            break
        sound = len(useless) < len(found[step])
        if not sound and step <= last:
            raise ResumeError(
                f"step {step} was trained behind the checkpoint and has to be trained again from its file, which is "
                f"of no use: {'; '.join(map(str, useless.values()))}; restore it, or submit the run anew"
            )
        then = "is trained from another file" if sound else "is made anew, since nothing was trained from its file"
        for file, why in useless.items():
            go_on()
            move_aside(run, file.path, ())
            told.append(f"step {step} {then}; set aside as of no use: {why}")
            log.warning("%s", told[-1])
        if not sound:
            break
    groups = {rollout.group for entry in entries for rollout in entry.trained}
    ended = {event.rollout for event in _events_of(earlier, groups, {"discarded", "issued_again"})}
    return list(takewhile(lambda entry: ended.isdisjoint(entry.trained), entries)), told


def _vocabulary(run: RunFolder) -> int:
    try:
        return read_model_config(run.model).vocabulary
    except UnsupportedModelError as error:
        raise ResumeError(f"{error}; restore the run's model folder, or submit the run anew") from error


def _check_issued(file: Path, ids: Sequence[RolloutId], ledger: pa.Table) -> None:
    """Whoever sampled them was handed them out, which the ledger had recorded by then. Raises StreamError."""
    issued = {event.rollout for event in _events_of(ledger, {i.group for i in ids}, {"issued"})}
    strange = [rollout for rollout in ids if rollout not in issued]
    if strange:
        raise StreamError(f"{file}: holds {len(strange)} rollouts that were never issued, {strange[0]} for one")


def _trained_behind(ledger: pa.Table, step: int) -> dict[int, set[RolloutId]]:
    """Step behind `step` to the rollouts that it was trained on, in whatever lineage: one that the run has gone back behind may
    have come further than the checkpoint's, and have been recorded before it."""
    rows = ledger.filter((pc.field("event") == "trained") & (pc.field("step") > step))
    trained: dict[int, set[RolloutId]] = {}
    for event in ledger_events(rows):
        trained.setdefault(event.step, set()).add(event.rollout)
    return trained


def _check_trained(file: Path, ids: Sequence[RolloutId], trained: Set[RolloutId] | None) -> None:
    """Later steps were made of what that step left over. Raises StreamError."""
    if trained is not None and trained != set(ids):
        raise StreamError(f"{file}: holds other rollouts than the ledger says that the step was trained on")


def _events_of(ledger: pa.Table, groups: Set[int], kinds: Set[EventKind]) -> list[LedgerEvent]:
    """The events of these kinds of these groups' rollouts."""
    of_group = pc.is_in(ledger.column("group_id"), value_set=pa.array(sorted(groups), pa.int64()))
    rows = ledger_events(ledger.filter(of_group))
    return [event for event in rows if event.kind in kinds]
