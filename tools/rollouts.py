#!/usr/bin/env python3
"""Prints, filters and exports the rollouts of a run, with their texts, rewards, versions and what became of them.

    python tools/rollouts.py runs/quickstart --limit 5                        five answers, to read
    python tools/rollouts.py runs/quickstart --step 10-12 --max-reward 0      those that failed in steps 10 to 12
    python tools/rollouts.py runs/quickstart --problem digits/17 --version 0:9 --finish length
    python tools/rollouts.py runs/quickstart --format jsonl > rollouts.jsonl
    python tools/rollouts.py runs/quickstart --output rollouts.parquet        one row a turn

Reads the rollout files of all attempts (with streams.keep: needed only those that are still there) and the ledger; files that
cannot be read, or that another run has written, are named and passed over. Special tokens are shown.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
import tokenizers

from prl.cli.console import printable
from prl.config.load import ConfigError, load
from prl.flow.versions import Version
from prl.report.audit_ids import Ids
from prl.runfolder.paths import RunFolder
from prl.streams.arrays import strings
from prl.streams.files import StreamError, StreamFile
from prl.streams.folder import rollout_files
from prl.streams.ledger import read_ledger
from prl.streams.reader import read_rollouts
from prl.streams.records import Group, Int32, Turn

SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in ("epoch", "group", "issue", "rollout", "turn")),
        *((name, pa.string()) for name in ("problem", "domain", "dataset")),
        ("end", pa.string()),  # trained, issued again or discarded with the reason; empty: none yet
        ("step", pa.int64()),  # that trained it; null: none
        ("reward", pa.float64()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        *((name, pa.string()) for name in ("prompt", "output", "finish_reason", "versions")),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("logprob_mean", pa.float64()),
        ("replica", pa.int64()),
        ("started", pa.float64()),
        ("ended", pa.float64()),
    ]
)
Row = dict[str, Any]


def main() -> int:
    options = parse()
    run = RunFolder(options.run)
    try:
        missing = next((folder for folder in (run.rollouts, run.ledgers) if not folder.is_dir()), None)
        files = list(chain.from_iterable(rollout_files(run).values()))
    except OSError as error:
        print(f"rollouts: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if missing is not None:
        print(f"rollouts: {options.run}: no run lies there (no {missing})", file=sys.stderr)
        return 1
    if not files:
        words = "no rollout was published yet, or they went through Redis, which keeps none (streams.backend)"
        print(f"rollouts: {options.run}: has no rollout files: {words}", file=sys.stderr)
        return 1
    try:
        ends = Ends(run)
    except (StreamError, OSError) as error:
        print(f"rollouts: {error}", file=sys.stderr)
        return 1
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(run.model / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing narrower
        print(f"rollouts: {run.model / 'tokenizer.json'}: cannot be read, and texts need it: {error}", file=sys.stderr)
        return 1
    try:
        name = load(run.config).run.mark
    except ConfigError as error:
        print(f"rollouts: {'; '.join(error.args)}", file=sys.stderr)
        return 1
    seen: set[str] = set()  # the problems of all rows that were read
    rows = islice((row for row in noted(all_rows(files, name, ends, tokenizer), seen) if wanted(row, options)), options.limit)
    first = next(rows, None)
    if first is None:
        told = tell_unknown(options, seen) or "none of its rollouts is as asked for; leave out some of the filters"
        print(f"rollouts: {options.run}: {told}", file=sys.stderr)
        return 1
    rows = chain([first], rows)
    form = options.format or (options.output.suffix.removeprefix(".") if options.output else "text")
    try:
        if form == "parquet":
            write_parquet(options.output, rows)
        else:
            with options.output.open("w") if options.output else open(1, "w", closefd=False) as out:
                out.writelines(to_text(row) if form == "text" else json.dumps(finite(row)) + "\n" for row in rows)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
    except OSError as error:
        print(f"rollouts: {options.output or 'the output'} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    if options.limit is None and (told := tell_unknown(options, seen)):  # all were read
        print(f"rollouts: {options.run}: {told}", file=sys.stderr)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--step", type=steps, metavar="N[-M]", help="trained in these steps")
    parser.add_argument("--problem", action="append", metavar="DOMAIN/INDEX", help="of this problem; may be given again")
    parser.add_argument("--min-reward", type=reward, metavar="R")
    parser.add_argument("--max-reward", type=reward, metavar="R")
    parser.add_argument("--finish", metavar="REASON", help="a turn that ended so: stop, length or abort")
    parser.add_argument("--version", type=version, metavar="LINEAGE:STEP", help="some tokens were sampled by this version")
    parser.add_argument("--limit", type=positive, metavar="N", help="no more than so many turns")
    parser.add_argument("--format", choices=("text", "jsonl", "parquet"), help="default: the output's suffix, or text")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the terminal")
    options = parser.parse_args()
    if None not in (options.min_reward, options.max_reward) and options.min_reward > options.max_reward:
        parser.error(f"--min-reward {options.min_reward:g} is above --max-reward {options.max_reward:g}: no reward is both")
    if options.format == "parquet" and options.output is None:
        parser.error("--format parquet needs --output FILE")
    if options.format is None and options.output is not None and options.output.suffix not in (".jsonl", ".parquet", ".text"):
        parser.error(f"--output {options.output}: end it in .jsonl, .parquet or .text, or give --format")
    return options


def positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,17}", text):
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def steps(text: str) -> range:
    first, dash, last = text.partition("-")
    found = range(positive(first), positive(last if dash else first) + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: the first step comes first, {last}-{first}")
    return found


def reward(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"{text}: must be a number")
    return found


def version(text: str) -> str:
    try:
        return str(Version.parse(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: a version is LINEAGE:STEP, such as 0:9") from None


class Ends:
    """What became of every rollout, from the ledger."""

    def __init__(self, run: RunFolder) -> None:
        table = read_ledger(run.ledgers).combine_chunks()
        rows = table.filter(pc.not_equal(table.column("event").cast(pa.string()), "issued"))
        columns = {name: rows.column(name).to_numpy() for name in ("group_id", "issue", "rollout", "step")}
        keys = Ids.keys(columns["group_id"], columns["issue"], columns["rollout"])[::-1]
        self._keys, last = np.unique(keys, return_index=True)  # the last row of an id holds
        self._rows = len(keys) - 1 - last
        self._step = columns["step"]
        self._event, self._reason = (strings(rows.column(name).combine_chunks()) for name in ("event", "reason"))

    def of(self, group: int, issue: int, rollout: int) -> tuple[str, int | None]:
        """(what, the step that trained it)."""
        key = Ids.keys(group, issue, rollout)
        at = int(np.searchsorted(self._keys, key))
        if at == len(self._keys) or self._keys[at] != key:
            return "", None
        row = int(self._rows[at])
        event, reason = self._event[row].replace("_", " "), self._reason[row]
        return (event, int(self._step[row])) if event == "trained" else (f"{event}: {reason}", None)


def all_rows(files: Sequence[StreamFile], run: str, ends: Ends, tokenizer: tokenizers.Tokenizer) -> Iterator[Row]:
    """One row a turn of what the run of this name has written, by writer and in the order in which it was written."""
    for file in files:
        try:
            groups = read_rollouts(file.path, file.bytes, file.checksum, run=run)
        except (StreamError, OSError) as error:
            print(f"rollouts: {error}", file=sys.stderr)
            continue
        for group in groups:
            yield from rows_of(group, ends, tokenizer)


def rows_of(group: Group, ends: Ends, tokenizer: tokenizers.Tokenizer) -> Iterator[Row]:
    facts = {"epoch": group.epoch, "group": group.group, "issue": group.issue}
    names = {"problem": group.problem, "domain": group.domain, "dataset": group.dataset}
    for number, rollout in zip(group.rollout_numbers(), group.rollouts, strict=True):
        end, step = ends.of(group.group, group.issue, number)
        whole = {"end": end, "step": step, "reward": rollout.reward, "metrics": dict(rollout.metrics)}
        for place, turn in enumerate(rollout.turns):
            yield {**facts, "rollout": number, "turn": place, **names, **whole, **of_turn(turn, tokenizer)}


def of_turn(turn: Turn, tokenizer: tokenizers.Tokenizer) -> Row:
    return {
        "prompt": to_words(turn.prompt_ids, tokenizer),
        "output": to_words(turn.output_ids, tokenizer),
        "finish_reason": turn.finish_reason,
        "versions": " ".join(str(span.version) for span in turn.versions),
        "prompt_tokens": len(turn.prompt_ids),
        "output_tokens": len(turn.output_ids),
        "logprob_mean": float(turn.logprobs.mean()) if len(turn.logprobs) else None,
        "replica": turn.replica,
        "started": turn.started,
        "ended": turn.ended,
    }


def to_words(ids: Int32, tokenizer: tokenizers.Tokenizer) -> str:
    """An id that is no token's has none, a negative one neither."""
    text: str = tokenizer.decode(ids.astype(np.uint32).tolist(), skip_special_tokens=False)
    return text


def noted(rows: Iterator[Row], seen: set[str]) -> Iterator[Row]:
    """The rows; the problem of each is added to `seen`."""
    for row in rows:
        seen.add(row["problem"])
        yield row


def tell_unknown(options: argparse.Namespace, seen: set[str]) -> str:
    """Which of the problems that were asked for are none of the run's, in words; empty where all are."""
    unknown = [problem for problem in options.problem or () if problem not in seen]
    if not unknown or not seen:
        return ""
    return printable(f"has no rollout of problem {', '.join(unknown)}; a problem's name is like {min(seen)}", keep="")


def wanted(row: Row, options: argparse.Namespace) -> bool:
    return (
        (options.step is None or (row["step"] is not None and row["step"] in options.step))
        and (options.problem is None or row["problem"] in options.problem)
        and (options.min_reward is None or row["reward"] >= options.min_reward)
        and (options.max_reward is None or row["reward"] <= options.max_reward)
        and (options.finish is None or row["finish_reason"] == options.finish)
        and (options.version is None or options.version in row["versions"].split())
    )


def finite(value: Any) -> Any:
    """The value with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_text(row: Row) -> str:
    trained = f"trained in step {row['step']}" if row["step"] is not None else row["end"] or "no end yet"
    head = (
        f"--- {row['problem']} group {row['group']} issue {row['issue']} rollout {row['rollout']} turn {row['turn']}: reward "
        f"{row['reward']:g}, {row['output_tokens']} tokens, {row['finish_reason']}, versions {row['versions']}, {trained}"
    )
    head = printable(head).replace("\n", "\\n")
    texts = "".join(f"{name}: {printable(row[name])}\n" for name in ("prompt", "output"))
    return f"{head}\n{texts}"


def write_parquet(path: Path, rows: Iterator[Row]) -> None:
    with path.open("wb") as file, parquet.ParquetWriter(file, SCHEMA) as writer:
        batch: list[Row] = []
        for row in rows:
            batch.append({**row, "metrics": list(row["metrics"].items())})
            if len(batch) == 4096:
                writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
                batch.clear()
        writer.write_table(pa.Table.from_pylist(batch, SCHEMA))


if __name__ == "__main__":
    sys.exit(main())
