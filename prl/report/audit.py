"""The audit of a run: does every rollout id that was issued have exactly one end, and do the streams' files bear it out?

An id ends by being trained in a step of the surviving lineage, by being discarded, or by being issued again. What an abandoned
lineage trained does not count: it is trained again from its durable step file, or has another end. Ids without an end are open;
that is a fault only where the run says of itself that it ended well.

Everything is held in columns, some 50 bytes a rollout; files are read one at a time.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from prl.config.load import ConfigError, load
from prl.config.schema import Config
from prl.report.audit_again import check_issued_again
from prl.report.audit_files import RolloutFiles, StepRows, check_age, open_own_step, read_rollout_files, step_rows
from prl.report.audit_ids import SHOWN, Findings, Ids, Int64, gaps, numbered, pairs_of
from prl.report.audit_ledger import AGAIN, DISCARDED, ISSUED, TRAINED, Ledger
from prl.report.read import ReportError, refuse_attempt
from prl.runfolder.outcome import OutcomeError, read_outcome
from prl.runfolder.paths import RunFolder
from prl.runfolder.plan import PlanError, read_plan
from prl.runfolder.reclaim import Reclaimed, read_reclaimed
from prl.streams.files import StreamError
from prl.streams.ledger import read_ledger
from prl.streams.steps import all_steps

UNREADABLE = "rollout file unreadable"  # the reason given for groups whose file was damaged


@dataclass
class Audit:
    """What was counted, and what is wrong."""

    run: str
    attempts: int
    replay: str  # the run whose step files this one trains on; its rollouts have their ends there
    ended: str | None  # the newest attempt's outcome, "unknown" where it is damaged; None: it still runs, or was killed
    steps: int = 0  # of the surviving lineage
    lineages: int = 0
    issued: int = 0
    trained: int = 0
    trained_again: int = 0  # also trained in a lineage that was abandoned
    discarded: dict[str, int] = field(default_factory=dict)  # by reason
    issued_again: dict[str, int] = field(default_factory=dict)
    open: int = 0
    rollout_files: int = 0
    rollouts_read: int = 0
    step_files: int = 0
    quarantined_files: int = 0  # damaged or foreign files, told apart by the run itself
    # Step files, damaged ones too, that the run does not need, and why: where a resume comes upon them, it sets them aside.
    passed_over: list[str] = field(default_factory=list)
    reclaimed_files: int = 0
    rollouts_kept: bool = True  # False: they went through Redis, so that there are none to check
    lag_max: int = -1
    findings: int = 0
    named: list[dict[str, str]] = field(default_factory=list)  # the first of each kind: what is concerned, what is wrong

    @property
    def passed(self) -> bool:
        return not self.findings


def audit(path: Path | str) -> Audit:
    """Audit a run, which may still go on. Raises ReportError where it is no run or its configuration cannot be read, and
    OSError where its folder may not be read."""
    run = RunFolder(path)
    refuse_attempt(run)
    if run.path.is_dir():
        os.scandir(run.path).close()  # else what may not be seen would be taken for missing
    if not os.path.lexists(run.config) or not run.ledgers.is_dir():
        raise ReportError(f"{path}: no run lies there (it needs config.yaml and streams/ledger)")
    try:
        config = load(run.config)
    except ConfigError as error:
        raise ReportError(*error.args) from error
    attempts = run.attempts()
    findings = Findings()
    ended = _outcome(run, attempts[-1], findings) if attempts else None
    result = Audit(str(run.path.resolve()), len(attempts), config.run.replay, ended)
    try:
        _reclaimed(run)  # damage is told before all else
        ledger = Ledger(read_ledger(run.ledgers), _forks(run, attempts), findings)
    except (StreamError, ValueError, PlanError) as error:
        findings.add("", str(error))
        return _with_findings(result, findings)
    _count(result, ledger)
    _check_ids(result, ledger, findings)
    check_issued_again(ledger, findings)
    configs = _configs(run, config, attempts)
    _check_numbers(ledger, np.unique([each.run.rollouts_per_group for each in configs]).astype(np.int64), findings)
    files = read_rollout_files(run, config.run.mark, lambda: _reclaimed(run), ledger.problems, findings)
    _check_rollout_files(result, run, config, ledger, files, findings)
    if configs and all(each.run.min_rollouts_per_group is None for each in configs):
        _check_whole_groups(ledger, files, findings)
    _check_step_files(result, run, config, ledger, files, findings)
    result.reclaimed_files = len(_reclaimed(run))
    return _with_findings(result, findings)


def _outcome(run: RunFolder, attempt: int, findings: Findings) -> str | None:
    try:
        outcome = read_outcome(run.exit(attempt))
    except OutcomeError as error:
        findings.add("", str(error))
        return "unknown"
    return None if outcome is None else outcome.outcome


def _forks(run: RunFolder, attempts: Sequence[int]) -> dict[int, int]:
    """Lineage to the step at which it left the one before, as the attempts' plans say."""
    forks: dict[int, int] = {}
    for plan in (run.plan(attempt) for attempt in attempts):
        if os.path.lexists(plan):
            forks |= read_plan(plan).forks
    return forks


def _reclaimed(run: RunFolder) -> dict[str, Reclaimed]:
    return {file.path: file for file in read_reclaimed(run)}


def _reclaimed_steps(run: RunFolder) -> set[int]:
    return {file.step for file in read_reclaimed(run) if file.kind == "step"}


def _with_findings(result: Audit, findings: Findings) -> Audit:
    result.findings = findings.count
    result.named = [{"what": what, "wrong": wrong} for what, wrong in findings.named]
    return result


def _count(result: Audit, ledger: Ledger) -> None:
    result.steps = int(ledger.step[ledger.survives].max(initial=0))
    result.lineages = len(np.unique(ledger.lineage[ledger.kind == TRAINED]))
    result.issued = len(ledger.ids)
    result.trained = int((ledger.per_id(ledger.survives) > 0).sum())
    abandoned = (ledger.kind == TRAINED) & ~ledger.survives
    result.trained_again = int(((ledger.per_id(ledger.survives) > 0) & (ledger.per_id(abandoned) > 0)).sum())
    for kind, counts in ((DISCARDED, result.discarded), (AGAIN, result.issued_again)):
        found = np.bincount(ledger.reason[ledger.kind == kind], minlength=len(ledger.reasons))
        counts.update({ledger.reasons[code]: int(found[code]) for code in np.argsort(-found).tolist() if found[code]})


def _check_ids(result: Audit, ledger: Ledger, findings: Findings) -> None:
    """The ledger by itself: every id issued once, ended once, and in the right order."""
    ids, ends = ledger.ids, ledger.per_id(ledger.ends)
    findings.add_ids(ids[ledger.per_id(ledger.kind == ISSUED) > 1], "issued twice")
    stray = ledger.key[(ledger.kind != ISSUED) & ~ledger.known]
    findings.add_ids(stray, lambda key: f"never issued, but {ledger.tell(key)}")
    findings.add_ids(ids[ends > 1], lambda key: f"has more than one end: {ledger.tell(key)}")
    ended_early = ledger.first_row(ledger.kind != ISSUED) < ledger.first_row(ledger.kind == ISSUED)
    findings.add_ids(ids[ended_early], "ended before it was issued")

    abandoned = (ledger.kind == TRAINED) & ~ledger.survives & ledger.known
    rows = np.flatnonzero(abandoned)
    rows = rows[np.lexsort((ledger.lineage[rows], ledger.key[rows]))]
    twice = (np.diff(ledger.key[rows]) == 0) & (np.diff(ledger.lineage[rows]) == 0)
    findings.add_ids(ledger.key[rows[1:]][twice], "trained twice in a lineage that was abandoned")
    _check_repeated(result, ledger, rows, findings)
    # Trained in an abandoned lineage alone: still to come where the surviving one has not got as far, else lost.
    furthest = np.zeros(len(ids), np.int64)
    np.maximum.at(furthest, ledger.at[abandoned], ledger.step[abandoned])
    lost = (ends == 0) & (furthest > 0) & (furthest <= result.steps)
    findings.add_ids(ids[lost], lambda key: f"lost with its lineage: {ledger.tell(key)}")
    still_open = (ends == 0) & ~lost
    result.open = int(still_open.sum())
    if result.ended == "done":
        findings.add_ids(ids[still_open], "has no end, and the run says that it ended well")


def _check_repeated(result: Audit, ledger: Ledger, abandoned: Int64, findings: Findings) -> None:
    """A step that was trained before a rollback is trained again as it was. `abandoned` are the rows of the first time."""
    places = np.unique(np.stack([ledger.lineage[abandoned], ledger.step[abandoned]], axis=1), axis=0)
    for lineage, step in places[places[:, 1] <= result.steps].tolist():
        of_step = ledger.step == step
        before = ledger.key[abandoned[of_step[abandoned] & (ledger.lineage[abandoned] == lineage)]]
        new = np.setdiff1d(ledger.key[ledger.survives & of_step], before)
        findings.add_ids(new, f"was trained in step {step}, but not when lineage {lineage} trained it before it was abandoned")


def _configs(run: RunFolder, config: Config, attempts: Sequence[int]) -> list[Config]:
    """Of the run and of its attempts: a resume may have changed it. Empty where an attempt's is not known."""
    paths = [run.attempt_config(attempt) for attempt in attempts]
    try:
        return [config, *(load(path) for path in paths if os.path.lexists(path))]
    except ConfigError:  # a finding, where that attempt has made a step file
        return []


def _check_numbers(ledger: Ledger, sizes: Int64, findings: Findings) -> None:
    """Groups, rollouts, issues and steps are numbered without gaps, and groups are issued whole."""
    pairs, counts = np.unique(pairs_of(ledger.ids), return_counts=True)  # (group, issue)
    numbers = np.zeros(len(pairs), np.int64)
    np.maximum.at(numbers, np.searchsorted(pairs, pairs_of(ledger.ids)), Ids.rollout(ledger.ids) + 1)
    wanted = sizes[np.minimum(np.searchsorted(sizes, numbers), len(sizes) - 1)] if len(sizes) else numbers
    broken = (counts != wanted) | (numbers > wanted)
    for pair, size in zip(pairs[broken][:SHOWN].tolist(), wanted[broken].tolist(), strict=False):
        whole = Ids.of_pair(pair, np.arange(size))
        issued = ledger.ids[pairs_of(ledger.ids) == pair]
        findings.add_ids(np.setdiff1d(whole, issued), "was never issued, but others of its group were")
        findings.add_ids(np.setdiff1d(issued, whole), f"was issued, but its group has {size} rollouts")
    findings.add_groups(pairs[broken][SHOWN:], "was issued in part")
    ended_again = np.unique(pairs_of(ledger.key[ledger.kind == AGAIN]))
    early = (Ids.issue_of_pair(pairs) > 0) & ~np.isin(pairs - 1, ended_again)
    findings.add_groups(pairs[early], "was handed out, but the issue before it was not issued again")
    groups = np.unique(Ids.group_of_pair(pairs))
    for start, end in gaps(groups):
        findings.add(numbered("group", start, end), "never handed out, but later groups were")
    for start, end in gaps(ledger.step[ledger.survives], 1):
        findings.add(numbered("step", start, end), "no rollout was trained there, but in later steps")


def _check_rollout_files(
    result: Audit, run: RunFolder, config: Config, ledger: Ledger, files: RolloutFiles, findings: Findings
) -> None:
    result.rollout_files, result.rollouts_read = len(files.names), len(files.key)
    stray = files.key[~ledger.contains(files.key)]
    if len(stray) and result.ended is None:  # a run that goes on: what it has issued since
        later = Ledger(read_ledger(run.ledgers), {}, Findings())
        stray = stray[~later.contains(stray)]
    findings.add_ids(stray, lambda key: f"lies in {files.where(key)}, but was never issued")
    keys, counts = np.unique(files.key, return_counts=True)
    findings.add_ids(keys[counts > 1], lambda key: f"lies in rollout files more than once: {files.where(key)}")
    result.rollouts_kept = config.streams.backend == "folder"
    if result.rollouts_kept:
        trained = np.unique(ledger.key[ledger.kind == TRAINED])
        lost = trained[~np.isin(trained, keys) & ~np.isin(pairs_of(trained), files.gone_pairs)]
        findings.add_ids(lost, lambda key: f"lies in no rollout file, but {ledger.tell(key)}")
    # A damaged file costs its groups, which the ledger then names: no fault of the run's. Those of files that were set aside
    # excuse no other file.
    unreadable = (ledger.kind != ISSUED) & np.isin(ledger.reason, [n for n, r in enumerate(ledger.reasons) if r == UNREADABLE])
    quarantined = len(np.setdiff1d(pairs_of(ledger.key[unreadable]), files.aside_pairs))
    aside = len(list(run.quarantine.glob("*.arrow")))
    result.quarantined_files = aside + min(len(files.damaged), quarantined)
    if len(files.damaged) > quarantined:
        for words in files.damaged:
            findings.add("", words)


def _check_whole_groups(ledger: Ledger, files: RolloutFiles, findings: Findings) -> None:
    """Where no partial groups are trained, actors publish groups whole, however they end."""
    others = np.isin(pairs_of(ledger.ids), pairs_of(files.key)) & ~np.isin(ledger.ids, files.key)
    others &= ledger.per_id(ledger.kind == TRAINED) == 0  # of trained ones it was told
    findings.add_ids(
        ledger.ids[others], lambda key: f"lies in no rollout file, others of its group do; it was {ledger.tell(key)}"
    )


def _check_step_files(
    result: Audit,
    run: RunFolder,
    config: Config,
    ledger: Ledger,
    files: RolloutFiles,
    findings: Findings,
) -> None:
    """Each step's file against the ledger, both ways, and against the rollouts that are still there."""
    found, newest = all_steps(run.steps), max(run.attempts(), default=0)
    gone = _reclaimed_steps(run)  # read after the listing: what a run deletes it records before
    config_of = cache(lambda attempt: load(run.attempt_config(attempt)))  # a resume may have changed it
    order = np.flatnonzero(ledger.survives)
    order = order[np.argsort(ledger.step[order], kind="stable")]
    of_order = ledger.step[order]
    for step in sorted({*found, *np.unique(of_order[of_order > 0]).tolist()}):
        low, high = np.searchsorted(of_order, (step, step + 1))
        recorded = np.unique(ledger.key[order[low:high]]) if step <= result.steps else None
        if step not in found:
            if step not in gone and recorded is not None and len(recorded):
                findings.add(f"step {step}", f"its file is not there; {len(recorded)} rollouts were trained in it")
            continue
        own, useless = open_own_step(found[step], config.run.mark, step, newest)
        if own is None and not any(os.path.lexists(file.path) for file in found[step]):
            gone = _reclaimed_steps(run)
            if step in gone:
                continue
        if own is None:
            if recorded is not None and len(recorded) and step not in gone:
                for words in useless:  # a resume would ask for the file that was trained
                    findings.add(f"step {step}", words)
            else:
                result.passed_over += useless
            continue
        result.passed_over += useless
        result.step_files += 1
        rows = step_rows(own.path.relative_to(run.path).as_posix(), step, own, ledger.problems, findings)
        if recorded is not None:
            _compare(step, rows, recorded, ledger, findings)
        result.lag_max = max(result.lag_max, int(rows.lag_max.max(initial=-1)))
        try:
            made_with = config_of(own.header.attempt)
        except ConfigError as error:
            findings.add(f"step {step}", f"its limit of the lag is not known: {'; '.join(error.args)}")
            continue
        check_age(made_with, step, rows, files, findings)


def _compare(step: int, rows: StepRows, recorded: Int64, ledger: Ledger, findings: Findings) -> None:
    only_file, only_ledger = np.setdiff1d(rows.key, recorded), np.setdiff1d(recorded, rows.key)
    findings.add_ids(
        only_file, lambda key: f"lies in the file of step {step}; the ledger says: {ledger.tell(key) or 'nothing'}"
    )
    findings.add_ids(only_ledger, f"was trained in step {step}, but is not in its file")


def render(result: Audit) -> str:
    """One screen."""
    ended = "still going on, or killed" if result.ended is None else f"ended: {result.ended}"
    lines = [
        f"audit of {result.run}: {_many(result.attempts, 'attempt')}, {ended}",
        f"  issued        {result.issued:>12,}  rollouts",
        f"  trained       {result.trained:>12,}  in {_many(result.steps, 'step')} of {_many(result.lineages, 'lineage')}"
        + (f"; {result.trained_again:,} of them in an abandoned lineage before" if result.trained_again else ""),
        f"  discarded     {sum(result.discarded.values()):>12,}  {_reasons(result.discarded)}",
        f"  issued again  {sum(result.issued_again.values()):>12,}  {_reasons(result.issued_again)}",
        f"  open          {result.open:>12,}",
        f"  files         {result.rollout_files:>12,}  of rollouts ({result.rollouts_read:,} rollouts), {result.step_files:,} "
        f"of steps; {result.reclaimed_files:,} reclaimed, {result.quarantined_files:,} quarantined, "
        f"{len(result.passed_over):,} passed over",
        f"  greatest lag  {result.lag_max:>12,}",
        *([] if result.rollouts_kept else ["  not checked: rollouts, which went through Redis and are not kept"]),
        *([f"  a replay of {result.replay}: audit that run for the rollouts"] if result.replay else []),
    ]
    lines += [f"  passed over, the run does not need it: {words}" for words in result.passed_over[:SHOWN]]
    lines += [f"  {entry['what']}: {entry['wrong']}" if entry["what"] else f"  {entry['wrong']}" for entry in result.named]
    if result.findings > len(result.named):
        lines.append(f"  ... and {result.findings - len(result.named):,} more")
    lines.append("audit: passed" if result.passed else f"audit: failed, {_many(result.findings, 'finding')}")
    return "\n".join(lines)


def as_json(result: Audit) -> dict[str, Any]:
    return {**asdict(result), "passed": result.passed}


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
