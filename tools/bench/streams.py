"""Rollouts through files, from arrays to flat tensors: prl's streams beside the usual ways.

    python tools/bench/streams.py [--rollouts 4000] [--folder DIR] [--rounds 5]

4,000 rollouts of log-normal length (mean 1,453 tokens) in 250 groups: token ids, log-probs, a reward each. Every way writes 64
groups at a time, makes them durable (fsync of the files and of their folder) and reads all of them back into flat arrays of
tokens, log-probs and rewards; "prl, groups" makes the records of each group and turn on the way, as the preprocessor does. Raw
.npy files hold numbers alone, those of "columns" all that prl's hold, those of "xxh3" checksums as well. Times are the best
round of each way, the ways taking turns, in another order each time; ratios are to prl's. `cpu` leaves out the disk.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from prl.flow.versions import Version
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import sync_folder
from prl.streams.opening import open_reader, open_writer
from prl.streams.options import StreamsOptions
from prl.streams.records import Group, Rollout, Turn, VersionSpan

GROUP = 16
AT_ONCE = 64  # groups
Flat = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]
Row = tuple[object, object, object, float]  # prompt, output, log-probs, reward
Way = tuple[Callable[[Path, Sequence[Group]], None], Callable[[Path], Flat]]


def make_groups(rollouts: int) -> list[Group]:
    rng = np.random.default_rng(0)
    sigma = np.sqrt(2 * np.log(1453 / 968))  # of a log-normal with this mean and median
    lengths = np.exp(rng.normal(np.log(968 - 150), sigma, rollouts)).astype(int) + 1
    lengths = np.maximum(1, lengths * (1453 - 150) // int(lengths.mean()))

    def rollout(length: int, prompt: npt.NDArray[np.int32]) -> Rollout:
        output = rng.integers(0, 151_000, length).astype(np.int32)
        logprobs = -rng.exponential(0.3, length).astype(np.float32)
        span = VersionSpan(Version(0, 7), 0, length)
        return Rollout((Turn(prompt, output, logprobs, (span,), "stop", 0, 1.0, 2.0),), float(rng.integers(2)))

    groups = []
    for number in range(rollouts // GROUP):
        prompt = rng.integers(0, 151_000, 150).astype(np.int32)
        made = tuple(rollout(int(n), prompt) for n in lengths[number * GROUP : (number + 1) * GROUP])
        groups.append(Group(0, "bench", "", f"bench/{number}", number, 0, made))
    return groups


def turns_of(groups: Sequence[Group]) -> Iterator[tuple[Turn, float]]:
    return ((turn, rollout.reward) for group in groups for rollout in group.rollouts for turn in rollout.turns)


def pieces(groups: Sequence[Group]) -> Iterator[Sequence[Group]]:
    return (groups[i : i + AT_ONCE] for i in range(0, len(groups), AT_ONCE))


def durable(path: Path, *pieces: bytes | npt.NDArray[Any]) -> None:
    """Write a file (arrays as .npy) that a crash leaves whole. Its name is durable once its folder is, too."""
    with path.open("wb") as file:
        for piece in pieces:
            if isinstance(piece, bytes):
                file.write(piece)
            else:
                np.save(file, piece)
        file.flush()
        os.fsync(file.fileno())


def write_prl(folder: Path, groups: Sequence[Group]) -> None:
    writer = open_writer(RunFolder(folder), "bench", "bench", 1, StreamsOptions(roll_groups=AT_ONCE))
    for group in groups:
        writer.append(group)
    writer.flush()
    writer.close()


def read_prl(folder: Path) -> Flat:
    reader = open_reader(RunFolder(folder), "bench", 1, StreamsOptions())
    parts = (rows for entry in reader.entries() for rows in reader.rows(entry))
    return flat(
        row
        for r in parts
        for row in cut(r.prompt_ids, r.output_ids, r.logprobs, r.prompt_offsets[1:], r.output_offsets[1:], r.rewards)
    )


def read_groups(folder: Path) -> Flat:
    reader = open_reader(RunFolder(folder), "bench", 1, StreamsOptions())
    groups = [group for entry in reader.entries() for group in reader.read(entry)]
    return flat((turn.prompt_ids, turn.output_ids, turn.logprobs, reward) for turn, reward in turns_of(groups))


def cut(prompts: Any, outputs: Any, logprobs: Any, prompt_ends: Any, output_ends: Any, rewards: Any) -> Iterator[Row]:
    """The rows of a file's flat arrays."""
    p = o = 0
    for to_p, to_o, reward in zip(prompt_ends.tolist(), output_ends.tolist(), rewards.tolist(), strict=True):
        yield prompts[p:to_p], outputs[o:to_o], logprobs[o:to_o], reward
        p, o = to_p, to_o


def flat(rows: Iterator[Row]) -> Flat:
    tokens: list[npt.NDArray[np.int32]] = []
    logprobs: list[npt.NDArray[np.float32]] = []
    rewards: list[float] = []
    for prompt, output, chosen, reward in rows:
        tokens += (np.asarray(prompt, np.int32), np.asarray(output, np.int32))
        logprobs.append(np.asarray(chosen, np.float32))
        rewards.append(reward)
    return np.concatenate(tokens), np.concatenate(logprobs), np.array(rewards, np.float32)


def row(turn: Turn, reward: float) -> dict[str, object]:
    return {
        "prompt_ids": turn.prompt_ids.tolist(),
        "output_ids": turn.output_ids.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "reward": reward,
    }


def lines_way(encode: Callable[[object], bytes], decode: Callable[[bytes], dict[str, object]]) -> Way:
    """JSON lines."""

    def write(folder: Path, groups: Sequence[Group]) -> None:
        for number, piece in enumerate(pieces(groups)):
            durable(folder / f"{number:04d}.jsonl", b"".join(encode(row(*turn)) + b"\n" for turn in turns_of(piece)))
            sync_folder(folder)

    def read(folder: Path) -> Flat:
        lines = (line for path in sorted(folder.iterdir()) for line in path.read_bytes().splitlines())
        rows = map(decode, lines)
        return flat((r["prompt_ids"], r["output_ids"], r["logprobs"], r["reward"]) for r in rows)  # type: ignore[misc]

    return write, read


def write_msgpack(folder: Path, groups: Sequence[Group]) -> None:
    for number, piece in enumerate(pieces(groups)):
        durable(folder / f"{number:04d}.msgpack", msgspec.msgpack.encode([row(*turn) for turn in turns_of(piece)]))
        sync_folder(folder)


def read_msgpack(folder: Path) -> Flat:
    rows = (r for path in sorted(folder.iterdir()) for r in msgspec.msgpack.decode(path.read_bytes()))
    return flat((r["prompt_ids"], r["output_ids"], r["logprobs"], r["reward"]) for r in rows)


def write_npy(folder: Path, groups: Sequence[Group], checksums: bool = False) -> None:
    """Flat arrays of numbers and nothing else: no ids, no versions, and checksums only if asked for."""
    for number, piece in enumerate(pieces(groups)):
        turns = list(turns_of(piece))
        arrays = {
            "prompts": np.concatenate([turn.prompt_ids for turn, _ in turns]),
            "outputs": np.concatenate([turn.output_ids for turn, _ in turns]),
            "logprobs": np.concatenate([turn.logprobs for turn, _ in turns]),
            "lengths": np.array([(len(turn.prompt_ids), len(turn.output_ids)) for turn, _ in turns], np.int32),
            "rewards": np.array([reward for _, reward in turns], np.float32),
        }
        for name, array in arrays.items():
            durable(folder / f"{name}_{number:04d}.npy", array, *([xxhash.xxh3_64_digest(array)] if checksums else []))
        sync_folder(folder)


def write_npy_columns(folder: Path, groups: Sequence[Group], checksums: bool = False) -> None:
    """A file a column, with all that a rollout file of prl holds but metrics (here there are none)."""
    for number, piece in enumerate(pieces(groups)):
        of = [(group, index, rollout) for group in piece for index, rollout in enumerate(group.rollouts)]
        turns = [rollout.turns[0] for _, _, rollout in of]
        spans = [span for turn in turns for span in turn.versions]
        arrays = {
            "prompts": np.concatenate([turn.prompt_ids for turn in turns]),
            "outputs": np.concatenate([turn.output_ids for turn in turns]),
            "logprobs": np.concatenate([turn.logprobs for turn in turns]),
            "lengths": np.array([(len(turn.prompt_ids), len(turn.output_ids)) for turn in turns], np.int32),
            "rewards": np.array([rollout.reward for _, _, rollout in of], np.float32),
            "ids": np.array([(group.epoch, group.group, index, group.issue) for group, index, _ in of], np.int64),
            "names": np.array([(group.problem, group.domain, group.dataset) for group in piece], np.str_),
            "spans": np.array([(s.version.lineage, s.version.step, s.start, s.end) for s in spans], np.int64),
            "spans_of": np.array([len(turn.versions) for turn in turns], np.int32),
            "reasons": np.array([turn.finish_reason for turn in turns], np.str_),
            "replicas": np.array([turn.replica for turn in turns], np.int32),
            "times": np.array([(turn.started, turn.ended) for turn in turns], np.float64),
        }
        for name, array in arrays.items():
            durable(folder / f"{name}_{number:04d}.npy", array, *([xxhash.xxh3_64_digest(array)] if checksums else []))
        sync_folder(folder)


def read_npy(folder: Path, checksums: bool = False) -> Flat:
    def load(name: str, number: int) -> Any:
        with (folder / f"{name}_{number:04d}.npy").open("rb") as file:
            array = np.load(file)
            if checksums:
                assert xxhash.xxh3_64_digest(array) == file.read()
        return array

    def rows() -> Iterator[Row]:
        for number in range(len(list(folder.glob("lengths_*.npy")))):
            names = ("prompts", "outputs", "logprobs", "lengths", "rewards")
            prompts, outputs, logprobs, lengths, rewards = (load(name, number) for name in names)
            yield from cut(prompts, outputs, logprobs, *lengths.cumsum(axis=0).T, rewards)

    return flat(rows())


WAYS: dict[str, Way] = {
    "prl": (write_prl, read_prl),
    "prl, groups": (write_prl, read_groups),
    "raw .npy": (write_npy, read_npy),
    "raw .npy, columns": (write_npy_columns, read_npy),
    "raw .npy, xxh3": (partial(write_npy, checksums=True), partial(read_npy, checksums=True)),
    "columns, xxh3": (partial(write_npy_columns, checksums=True), partial(read_npy, checksums=True)),
    "msgpack, lists": (write_msgpack, read_msgpack),
    "JSONL, orjson": lines_way(orjson.dumps, orjson.loads),
    "JSONL, json": lines_way(lambda value: json.dumps(value).encode(), json.loads),
}


def timed(work: Callable[[], object]) -> tuple[float, float, object]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4000)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    groups = make_groups(arguments.rollouts)
    wanted = flat((turn.prompt_ids, turn.output_ids, turn.logprobs, reward) for turn, reward in turns_of(groups))
    raw_bytes = sum(group.payload_bytes() for group in groups)
    best = {name: [float("inf")] * 4 for name in WAYS}  # write, write cpu, read, read cpu: seconds
    size_bytes = dict.fromkeys(WAYS, 0)
    shuffled = random.Random(0)  # noqa: S311  (what ran before a way leaves it memory and a disk in another state)
    for _ in range(arguments.rounds):
        for name, (write, read) in shuffled.sample(list(WAYS.items()), len(WAYS)):
            folder = Path(tempfile.mkdtemp(dir=arguments.folder))
            try:
                write_s, write_cpu_s, _ = timed(lambda write=write, folder=folder: write(folder, groups))  # type: ignore[misc]
                size_bytes[name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                read_s, read_cpu_s, found = timed(lambda read=read, folder=folder: read(folder))  # type: ignore[misc]
            finally:
                shutil.rmtree(folder)
            for a, b in zip(found, wanted, strict=True):  # type: ignore[call-overload]
                np.testing.assert_allclose(a, b, rtol=1e-6)
            best[name] = list(map(min, best[name], (write_s, write_cpu_s, read_s, read_cpu_s)))
    print(f"{arguments.rollouts} rollouts, {len(wanted[0]) / 1e6:.1f} M tokens, {raw_bytes / 1e6:.1f} MB of numbers")
    print(f"{'':16}{'MB':>8}{'of raw':>8}{'write s':>9}{'cpu':>8}{'read s':>9}{'cpu':>8}{'both s':>9}{'to prl':>8}{'cpu':>7}")
    own_s, own_cpu_s = best["prl"][0] + best["prl"][2], best["prl"][1] + best["prl"][3]
    for name, (write_s, write_cpu_s, read_s, read_cpu_s) in best.items():
        mb, both_s, cpu_s = size_bytes[name] / 1e6, write_s + read_s, write_cpu_s + read_cpu_s
        sizes = f"{mb:8.1f}{size_bytes[name] / raw_bytes:8.3f}"
        times = f"{write_s:9.3f}{write_cpu_s:8.3f}{read_s:9.3f}{read_cpu_s:8.3f}{both_s:9.3f}"
        print(f"{name:16}{sizes}{times}{both_s / own_s:8.2f}{cpu_s / own_cpu_s:7.2f}")


if __name__ == "__main__":
    main()
