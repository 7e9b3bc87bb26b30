"""Speed of the preprocessor on prepared rollouts: tokens/s of one core, and the time from a step's last rollouts to its file.

    .venv/bin/python tools/bench/preprocess.py [--rollouts 4096] [--repeat 5]

The rollouts lie ready in memory, as the Arrow files that actors write: log-normal lengths with a mean of 1,450 tokens in all,
groups of 16, two versions each, steps of 32 groups dealt to 8 ranks, bins of 16,384 tokens. Every pass reads all of them,
builds all steps and writes their files to a temporary folder (TMPDIR). The best pass counts. CPU seconds are the process's own,
so that they hold on a busy machine too; the filesystem's part is wall time.
"""

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from prl.flow.versions import Version
from prl.preprocess.assemble import Moment
from prl.preprocess.builder import Builder, BuilderSettings
from prl.preprocess.options import PreprocessOptions
from prl.preprocess.steps import Arrival, StepMaker
from prl.runfolder.paths import RunFolder
from prl.streams.contract import Published
from prl.streams.memory import MemoryAppender, MemorySource, MemoryStore
from prl.streams.options import StreamsOptions
from prl.streams.reader import RolloutReader
from prl.streams.records import Group, Rollout, Turn, VersionSpan
from prl.streams.writer import RolloutWriter

GROUPS_PER_STEP, ROLLOUTS_PER_GROUP, GROUPS_PER_ENTRY, RANKS = 32, 16, 4, 8
VOCABULARY = 150_000
OPTIONS = PreprocessOptions(pack_tokens=16384)


@dataclass
class Pass:
    """Seconds of one pass over all rollouts. `cpu`: of the process; `last_*`: of a step's last entry, mean over the steps."""

    cpu_s: float = 0.0
    read_cpu_s: float = 0.0
    build_cpu_s: float = 0.0
    publish_wall_s: float = 0.0
    last_read_s: float = 0.0
    last_build_s: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prl_bench_"))
    try:
        run = RunFolder(folder / "run")
        run.create()
        store = MemoryStore()
        entries, tokens = prepare(store, arguments.rollouts)
        size = sum(entry.bytes for entry in entries)
        steps = arguments.rollouts // (GROUPS_PER_STEP * ROLLOUTS_PER_GROUP)
        print(f"{arguments.rollouts} rollouts, {tokens / 1e6:.2f} M tokens, {size / 1e6:.1f} MB in {len(entries)} entries")
        passes = [one_pass(run, store, entries, sequence) for sequence in range(arguments.repeat)]
        report(passes, tokens, steps)
    finally:
        shutil.rmtree(folder)


def prepare(store: MemoryStore, rollouts: int) -> tuple[list[Published], int]:
    """The entries and their tokens."""
    options = StreamsOptions(roll_groups=GROUPS_PER_ENTRY)
    writer = RolloutWriter(MemoryAppender(store, "bench"), "bench", "bench", 1, options)
    entries: list[Published] = []
    tokens = 0
    for group in make_groups(rollouts // ROLLOUTS_PER_GROUP):
        entries += writer.append(group)
        tokens += sum(len(t.prompt_ids) + len(t.output_ids) for r in group.rollouts for t in r.turns)
    return [*entries, *writer.flush()], tokens


def make_groups(groups: int) -> Iterator[Group]:
    rng = np.random.default_rng(1)
    for number in range(groups):
        prompt = rng.integers(0, VOCABULARY, 150).astype(np.int32)
        rollouts = []
        for _ in range(ROLLOUTS_PER_GROUP):
            length = min(int(rng.lognormal(6.7, 0.95)), 15_000) + 1
            output = rng.integers(0, VOCABULARY, length).astype(np.int32)
            spans = (VersionSpan(Version(0, 0), 0, length // 2), VersionSpan(Version(0, 1), length // 2, length))
            turn = Turn(prompt, output, -rng.random(length, np.float32), spans, "stop", 0, 0.0, 1.0)
            rollouts.append(Rollout((turn,), float(rng.integers(2))))
        yield Group(0, "bench", "", f"bench/{number}", number, 0, tuple(rollouts))


def one_pass(run: RunFolder, store: MemoryStore, entries: list[Published], sequence: int) -> Pass:
    maker = StepMaker(OPTIONS, GROUPS_PER_STEP, "arrival", OPTIONS.memory_mib * 2**20)
    builder = Builder(BuilderSettings(str(run.path), "bench", 1, OPTIONS, StreamsOptions(), RANKS, VOCABULARY))
    reader = RolloutReader(MemorySource(store), "bench", VOCABULARY)
    taken, step = Pass(), 1
    begun = time.process_time()
    for entry in entries:
        wall, cpu = time.perf_counter(), time.process_time()
        for group in reader.read(entry):
            maker.add(group, entry, Arrival(0, 0, 0))
        taken.read_cpu_s += time.process_time() - cpu
        read_s = time.perf_counter() - wall
        moment = Moment(step + 1, 0, {}, 10**6)
        chosen = maker.choose(moment)
        if chosen is None:
            continue
        cpu = time.process_time()
        built = builder.build(maker.take(chosen, moment), sequence)
        taken.build_cpu_s += time.process_time() - cpu
        published = builder.publish(moment.step)
        published.file.path.unlink()
        taken.publish_wall_s += published.seconds
        taken.last_read_s += read_s
        taken.last_build_s += built.seconds
        step += 1
        maker.trained(moment.step)
    taken.cpu_s = time.process_time() - begun
    return taken


def report(passes: list[Pass], tokens: int, steps: int) -> None:
    best = Pass(*(min(getattr(p, field.name) for p in passes) for field in fields(Pass)))
    per_step_ms = 1000 / steps
    print(f"one core                {tokens / best.cpu_s / 1e6:.2f} M tokens/s, writing included")
    print(f"  reading               {1e9 * best.read_cpu_s / tokens:.0f} ns a token")
    print(f"  building              {1e9 * best.build_cpu_s / tokens:.0f} ns a token")
    print(f"a step ({tokens / steps / 1e6:.2f} M tokens), from its last rollouts' announcement to its file")
    print(f"  reading the last one  {per_step_ms * best.last_read_s:.1f} ms")
    print(f"  building              {per_step_ms * best.last_build_s:.1f} ms")
    print(f"  filesystem            {per_step_ms * best.publish_wall_s:.1f} ms")
    print(f"largest memory          {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
