"""Replay from rollouts: the steps of another run are built anew from its rollout files, with this run's options."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import chain

import pyarrow.compute as pc

from prl.config.hf_config import read_model_config
from prl.config.load import load
from prl.config.schema import Config
from prl.control.child import Child
from prl.control.client import ControlClient
from prl.flow.ids import RolloutId
from prl.preprocess.assemble import (
    CUT,
    EQUAL,
    OVERLONG,
    TOO_OLD,
    Moment,
    Prepared,
    Step,
    build_step,
    drop_metrics,
    is_too_old,
    prepare,
)
from prl.runfolder.paths import RunFolder
from prl.streams.files import StreamError, StreamFile, next_sequence
from prl.streams.folder import rollout_files
from prl.streams.ledger import read_ledger
from prl.streams.reader import read_rollouts, read_rows
from prl.streams.records import Group
from prl.streams.steps import write_step

_LONG_POLL_S = 5.0
_FILES_HELD = 8  # rollout files in memory at once; those of one step mostly lie in few
_DISCARDS = {
    EQUAL: "preprocess.drop_equal_groups",
    CUT: "preprocess.mask_cut",
    OVERLONG: "preprocess.pack_tokens",
    TOO_OLD: "preprocess.too_old, run.max_lag",
}  # the options by which rollouts are discarded


class Original:
    """The run whose rollouts are trained on again."""

    def __init__(self, run: RunFolder, vocabulary: int | None = None) -> None:
        """`vocabulary`: how many tokens the model knows. Reads the ledger, and looks once into every rollout file; those that
        cannot be read, or that another run or model has written, are named and passed over, as no step may need them."""
        self.run = run
        name = load(run.config).run.mark
        self._steps = _groups_of_steps(run)
        self._files: dict[tuple[int, int], StreamFile] = {}  # by group and issue
        self._read = lru_cache(_FILES_HELD)(_read)
        for file in chain.from_iterable(rollout_files(run).values()):
            try:
                found = read_rows(file.path, file.bytes, file.checksum, run=name, vocabulary=vocabulary)
            except (StreamError, OSError) as error:
                print(f"passed over: {error}", flush=True)
                continue
            for rows in found:
                self._files |= dict.fromkeys(rows.issues(), file)

    def groups(self, step: int) -> list[Group]:
        """The groups that the surviving lineage trained in a step, in the ledger's order. Raises StreamError where one is not
        there any more, or no such step was trained."""
        if step not in self._steps:
            raise StreamError(f"{self.run}: step {step} was not trained there; lower run.steps")
        groups = []
        for pair in self._steps[step]:
            if pair not in self._files:
                raise StreamError(
                    f"{self.run}: the rollouts of group {pair[0]}, trained in step {step}, are in no file that can be read"
                )
            groups.append(self._read(self._files[pair])[pair])
        return groups


def rebuild(original: Original, step: int, config: Config, data_parallel_size: int) -> Step:
    """A step of the original run, built with the options of `config`. Its number is that in which the original trained it, so
    that the lag of every token is what it was there; groups above this run's limit are discarded whole, or their old tokens
    are masked, as in a live run (preprocess.too_old), with nothing in their place. Raises StreamError where nothing is left.
    """
    moment, too_old = Moment(step, 0, {}, config.run.lag_limit), config.preprocess.too_old
    kept: list[Prepared] = []
    left_out: list[tuple[RolloutId, str]] = []
    for group in (prepare(group, config.preprocess) for group in original.groups(step)):
        if not group.samples:
            left_out += group.discarded
        elif is_too_old(group.versions, group.newest, moment, too_old):
            left_out += [(rollout, TOO_OLD) for rollout in group.ids]
        else:
            kept.append(group)
    if not kept:
        raise StreamError(f"{original.run}: of step {step} nothing is left to train on: {_why_nothing(left_out)}")
    made = build_step(kept, moment, config.preprocess, data_parallel_size)
    return replace(made, discarded=[*left_out, *made.discarded])


def _why_nothing(discarded: Iterable[tuple[RolloutId, str]]) -> str:
    """Rollouts by the reason for which they are discarded, each with its options."""
    counts = Counter(f"{reason} ({_DISCARDS[reason]})" if reason in _DISCARDS else reason for _, reason in discarded)
    return "; ".join(f"{count} rollouts: {reason}" for reason, count in counts.items())


async def replay(child: Child, client: ControlClient, data_parallel_size: int) -> None:
    """Write one step file after another, at most one ahead of the trainer. None of their rollouts has an end in this run."""
    wait_s, heard_s = child.config.control.wait_s, _LONG_POLL_S + child.config.control.trainers_s
    client.progress(f"looking through the rollouts of {child.config.run.replay}")
    vocabulary = read_model_config(child.model).vocabulary
    original = await asyncio.to_thread(Original, RunFolder(child.config.run.replay), vocabulary)
    sequence = next_sequence(child.run.steps)
    trained_step = -1  # not known yet: the first answer comes at once
    while not client.stopping.is_set():
        body = {"after": 0, "trained_step": trained_step}
        answer = await client.call("next_rollouts", body, deadline_s=heard_s, reason="waiting for the trainer")
        trained_step, step = int(answer["trained_step"]), int(answer["next_step"])
        if answer["stop"] or step > child.config.run.steps:
            await client.stopping.wait()
            return
        for number in range(step, min(trained_step + 2, child.config.run.steps) + 1):
            client.progress(f"building step {number}")
            made = await asyncio.to_thread(rebuild, original, number, child.config, data_parallel_size)
            file = await asyncio.to_thread(_write, child, made, sequence)
            sequence += 1
            announcement = {
                "step": number,
                "path": file.path.relative_to(child.run.path).as_posix(),
                "bytes": file.bytes,
                "checksum": file.checksum,
                "trained": [],
                "discarded": [],
                "metrics": drop_metrics(Counter(reason for _, reason in made.discarded)),
            }
            await client.call("step_file", announcement, deadline_s=wait_s, reason=f"announcing step {number}")


def _write(child: Child, made: Step, sequence: int) -> StreamFile:
    return write_step(
        child.run.steps,
        made.microbatches,
        made.facts,
        run=child.config.run.mark,
        attempt=child.attempt,
        sequence=sequence,
        metrics=made.metrics,
    )


def _read(file: StreamFile) -> dict[tuple[int, int], Group]:
    groups = read_rollouts(file.path, file.bytes, file.checksum)
    return {(group.group, group.issue): group for group in groups}


def _groups_of_steps(run: RunFolder) -> dict[int, list[tuple[int, int]]]:
    """Step to its groups and issues: where it was trained in several lineages, those of the last."""
    table = read_ledger(run.ledgers)
    rows = table.filter(pc.field("event") == "trained")
    lineages: dict[int, int] = {}
    found: dict[int, dict[tuple[int, int], None]] = {}
    columns = (rows.column(name).to_pylist() for name in ("step", "version_lineage", "group_id", "issue"))
    for step, lineage, group, issue in zip(*columns, strict=True):
        if lineage > lineages.get(step, -1):
            lineages[step], found[step] = lineage, {}
        found[step].setdefault((group, issue))
    return {step: list(pairs) for step, pairs in found.items()}
