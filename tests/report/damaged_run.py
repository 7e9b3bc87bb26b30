"""Changes to a run that was played, of which an audit has to name the id."""

import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from played_run import Attempt, Crash, new_run

from prl.flow.ids import RolloutId
from prl.report.audit import audit, render
from prl.runfolder.paths import RunFolder
from prl.streams import rollouts
from prl.streams.files import Header, encode_file, list_published, open_arrow, publish_arrow, read_checked
from prl.streams.ledger import LedgerWriter, ledger_events, read_ledger
from prl.streams.steps import find_steps, read_step, write_step

FAR = 40  # added to a number, so that no rollout has it


def words(rollout: RolloutId) -> str:
    return f"group {rollout.group} issue {rollout.issue} rollout {rollout.rollout}"


def names(run: RunFolder, *ids: RolloutId) -> bool:
    """Whether the audit fails, and names one of these ids."""
    result = audit(run.path)
    return not result.passed and any(f"  {words(i)}: " in render(result) for i in ids)


def edit_ledger(run: RunFolder, edit) -> None:
    events = edit(list(ledger_events(read_ledger(run.ledgers))))
    shutil.rmtree(run.ledgers)
    with LedgerWriter(run.ledger(1)) as ledger:
        ledger.append(events)


def play_until_crash(folder) -> RunFolder:
    run, settings = new_run(folder)
    with pytest.raises(Crash):
        Attempt(run, settings, seed=0, crash_at=70).play()
    return run


def edit_rollouts(run: RunFolder, edit, kind: str = "trained") -> RolloutId:
    """Change the table of the first rollout file whose row 1 is of a rollout with such an event in the ledger; its id."""
    wanted = {e.rollout for e in ledger_events(read_ledger(run.ledgers)) if e.kind == kind}
    for writer in sorted(run.rollouts.iterdir()):
        for _, file in list_published(writer):
            data = read_checked(file.path, file.bytes, file.checksum)
            opened = open_arrow(file.path, data, rollouts.KIND, rollouts.SCHEMA, None)
            row = opened.batches[0].slice(1, 1).to_pylist()[0]
            found = RolloutId(row["epoch"], row["problem_id"], row["group_id"], row["rollout"], row["issue"])
            if found in wanted:
                file.path.unlink()
                write_rollouts(writer, opened.header, edit(opened.batches[0]))
                return found
    raise AssertionError


def write_rollouts(folder, header: Header, batch: pa.RecordBatch) -> None:
    schema = rollouts.SCHEMA.with_metadata(header.metadata())
    data = encode_file(schema, [pa.record_batch(batch.columns, schema=schema)])
    publish_arrow(folder, rollouts.KIND, header, data)


def take(batch: pa.RecordBatch, rows: list[int]) -> pa.RecordBatch:
    return batch.take(pa.array(rows))


def edit_step(run: RunFolder, step: int, members) -> RolloutId:
    """Rewrite a step's file with other sequences of its first micro-batch, in `members` (number, its new rollout number or
    None), and facts that fit; the id of sequence 1."""
    file = find_steps(run.steps)[step]
    found = read_step(file.path, file.bytes, file.checksum)
    batches = [found.microbatch(n) for n in range(found.facts.microbatches)]
    first, ids = batches[0], batches[0].rollouts
    pieces = [slice(first.boundaries[n], first.boundaries[n + 1]) for n, _ in members]
    arrays = {
        name: np.concatenate([getattr(first, name)[piece] for piece in pieces])
        for name in ("tokens", "positions", "loss_weights", "advantages", "old_logprobs", "lags")
    }
    boundaries = np.cumsum([0, *(piece.stop - piece.start for piece in pieces)]).astype(np.int32)
    new = tuple(ids[n] if number is None else replace(ids[n], rollout=number) for n, number in members)
    batches[0] = replace(first, **arrays, boundaries=boundaries, rollouts=new)
    weights = np.concatenate([batch.loss_weights for batch in batches])
    samples = len({i for batch in batches for i in batch.rollouts})
    facts = replace(found.facts, denominator=float(weights.sum()), trained_tokens=int((weights > 0).sum()), samples=samples)
    file.path.unlink()
    write_step(run.steps, batches, facts, run="played", attempt=file.attempt, sequence=file.sequence)
    return ids[1]
