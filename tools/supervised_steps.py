#!/usr/bin/env python3
"""Makes step files of given prompts and answers, on which `prl-submit --replay` trains: supervised, for instance as a warm
start of reinforcement learning.

    python tools/supervised_steps.py my.yaml runs/given answers.jsonl --passes 2
    prl-submit my.yaml --replay runs/given --set train.loss=sft run.folder=runs/warm run.steps=N       (N: what the first said)
    prl-submit my.yaml --set model.path=runs/warm/export                                               from there on by reward

Files are .parquet, .jsonl or .jsonl.gz with the columns prompt and answer. A prompt is a text, or a list of messages
({role, content}) for the model's chat template. An answer is a text; the end of text is appended. The model, its tokenizer, the
seed of the order and the packing are those of the configuration. Answers that do not fit preprocess.pack_tokens are left out
and counted. (A configuration whose model starts from random weights needs model.init=pretrained and model.architecture=null
besides the path.)
"""

import argparse
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prl.actor.tokenizer import ModelTokenizer
from prl.cluster.split import make_split
from prl.config.load import ConfigError, dump, load
from prl.config.paths import resolve_paths
from prl.config.schema import Config
from prl.domains.api import DomainError
from prl.domains.rows import read_rows
from prl.flow.versions import Version
from prl.preprocess.assemble import Moment, build_step, prepare
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.streams.records import Group, Rollout, Turn, VersionSpan
from prl.streams.steps import write_step

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # ids of a prompt and of its answer


def main() -> int:
    options = parse()
    made = options.folder.with_name(f".tmp-{options.folder.name}")
    try:
        if options.folder.exists():
            raise FileExistsError(f"{options.folder} exists; remove it, or name another folder")
        shutil.rmtree(made, ignore_errors=True)
        print(f"{options.folder}: {make(RunFolder(made), options)}")
        made.rename(options.folder)
    except (ConfigError, DomainError, OSError, ValueError) as error:
        shutil.rmtree(made, ignore_errors=True)
        print(f"supervised_steps: {error}", file=sys.stderr)
        return 1
    return 0


def make(folder: RunFolder, options: argparse.Namespace) -> str:
    """Write the folder; what is in it, in words."""
    config = resolve_paths(load(options.config, options.set), Path.cwd())
    folder.create()
    folder.config.write_text(dump(config))
    write_model_folder(config.model, folder.model)
    pairs = [pair for path in options.files for pair in encoded(path, ModelTokenizer(folder.model))]
    steps, left_out = write_steps(config, folder, pairs, options.passes, options.answers_per_step)
    return f"{steps} steps of {len(pairs)} answers, {options.passes} times through; {left_out} left out as too long"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="configuration of the run that is to train on them")
    parser.add_argument("folder", type=Path, help="folder to be written, for prl-submit --replay")
    parser.add_argument("files", type=Path, nargs="+", metavar="file", help="prompts and answers")
    parser.add_argument("--passes", type=positive, default=1, metavar="N", help="times through the data (default 1)")
    parser.add_argument(
        "--answers-per-step", type=positive, metavar="N", help="default: run.groups_per_step * run.rollouts_per_group"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the configuration to override")
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def encoded(path: Path, tokenizer: ModelTokenizer) -> Iterator[Pair]:
    """The file's rows as token ids. Raises DomainError naming the row that is none."""
    for number, row in enumerate(read_rows(path)):
        prompt, answer = row.get("prompt"), row.get("answer")
        where = f"{path}, row {number}"
        if not isinstance(answer, str) or not isinstance(prompt, str | list) or not prompt:
            raise DomainError(f"{where}: expected the columns prompt (text or messages) and answer (text); found {_kinds(row)}")
        try:
            prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)
        except DomainError as error:
            raise DomainError(f"{where}: {error}") from error
        except (AttributeError, TypeError) as error:
            raise DomainError(f"{where}: its messages are not of the form {{role, content}}: {error}") from error
        yield prompt_ids, (*tokenizer.encode(answer), tokenizer.end_ids[0])


def _kinds(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())


def write_steps(config: Config, folder: RunFolder, pairs: Sequence[Pair], passes: int, per_step: int | None) -> tuple[int, int]:
    """Shuffled anew in each pass; the last step may be smaller. Returns the steps, and the answers that were left out."""
    per_step = per_step or config.run.groups_per_step * config.run.rollouts_per_group
    ranks = make_split(config).data_parallel
    # Nothing was sampled: there are no rewards to tell groups apart, and no lag.
    options = replace(config.preprocess, drop_equal_groups=False, mask_cut=False, advantage="group_mean", too_old="train")
    order = [(epoch, row) for epoch in range(passes) for row in shuffled(len(pairs), config.run.seed, epoch)]
    steps = left_out = 0
    for start in range(0, len(order), per_step):
        groups = [
            prepare(given(epoch, row, start + place, pairs[row], steps), options)
            for place, (epoch, row) in enumerate(order[start : start + per_step])
        ]
        fitting = [group for group in groups if group.samples]
        left_out += len(groups) - len(fitting)
        if fitting:
            steps += 1
            made = build_step(fitting, Moment(steps, 0, {}, 0), options, ranks)
            write_step(folder.steps, made.microbatches, made.facts, run=config.run.mark, attempt=1, sequence=steps)
    if not steps:
        raise ValueError(f"no answer that fits preprocess.pack_tokens = {config.preprocess.pack_tokens} among {len(pairs)}")
    return steps, left_out


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    rows = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(rows)  # noqa: S311 (an order, no secret)
    return rows


def given(epoch: int, row: int, group: int, pair: Pair, version: int) -> Group:
    """An answer in the form of a rollout that version `version`, which the next step trains, had sampled with certainty."""
    prompt, answer = (np.array(ids, np.int32) for ids in pair)
    span = VersionSpan(Version(0, version), 0, len(answer))
    turn = Turn(prompt, answer, np.zeros(len(answer), np.float32), (span,), "stop", 0, 0.0, 0.0)
    return Group(epoch, "given", "given", f"given/{row}", group, 0, (Rollout((turn,), reward=0.0),))


if __name__ == "__main__":
    sys.exit(main())
