"""Rollout files, as an actor writes them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from stream_data import make_group

from prl.runfolder.paths import RunFolder
from prl.streams.contract import Published
from prl.streams.opening import open_writer
from prl.streams.options import StreamsOptions
from prl.streams.records import Group
from prl.streams.writer import RolloutWriter

ACTOR = "streams/rollouts/actor_0"


def writer_in(folder: Path, **options) -> RolloutWriter:
    return open_writer(RunFolder(folder), "actor_0", "run", 1, StreamsOptions(**options))


@dataclass
class Written:
    """What a writer published, as a file."""

    entry: Published
    path: Path
    bytes: int
    checksum: str


def write(folder: Path, groups: list[Group]) -> Written:
    writer = writer_in(folder, roll_groups=1000)
    for group in groups:
        assert writer.append(group) == []
    (entry,) = writer.flush()
    writer.close()
    return Written(entry, folder / entry.name, entry.bytes, entry.checksum)


def write_one(folder: Path) -> Written:
    """One group of two rollouts, always the same."""
    return write(folder, [make_group(0, np.random.default_rng(0))])
