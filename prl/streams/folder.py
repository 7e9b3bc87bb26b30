"""The rollout stream as Arrow files: streams/rollouts/<writer>/rollouts_a<attempt>_<sequence>_<bytes>_<xxh3>.arrow."""

import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

import pyarrow as pa

from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import open_folder
from prl.runfolder.reclaim import move_aside
from prl.streams.contract import Cursor, Published, check_writer, is_writer
from prl.streams.files import (
    FILE_NAME,
    Encoded,
    Header,
    StreamError,
    StreamFile,
    list_published,
    next_sequence,
    publish_arrow,
    read_checked,
)
from prl.streams.rollouts import KIND


class FolderAppender:
    """One writer's folder, kept open: a file costs its creation, a rename and the folder's fsync."""

    def __init__(self, run: RunFolder, writer: str) -> None:
        self._root = run.path
        self._folder = _folder_of(run, writer)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.next_sequence = next_sequence(self._folder)
        self._descriptor = open_folder(self._folder)

    def put(self, header: Header, data: Encoded) -> Published:
        try:
            file = publish_arrow(self._folder, KIND, header, data, self._descriptor)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            # The server has forgotten what was open: open it again, once. Should that fail, the old one is still ours.
            stale, self._descriptor = self._descriptor, open_folder(self._folder)
            os.close(stale)
            file = publish_arrow(self._folder, KIND, header, data, self._descriptor)
        return _published(file, self._root)

    def close(self) -> None:
        os.close(self._descriptor)


class FolderSource:
    """All writers' folders of a run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._folders: dict[str, Path] = {}  # of writers, once looked at

    def fetch(self, entry: Published, wait_s: float) -> pa.Buffer:
        return read_checked(self._path(entry.name), entry.bytes, entry.checksum, wait_s=wait_s)

    def entries(self) -> Iterator[Published]:
        for files in rollout_files(self._run).values():
            for file in files:
                yield _published(file, self._run.path)

    def set_aside(self, entry: Published) -> None:
        try:
            path = self._path(entry.name)
        except StreamError:
            return  # no file of the stream
        move_aside(self._run, path, [(facts.group, facts.issue) for facts in entry.groups])

    def release(self, done: Cursor, held: Collection[Published] = ()) -> None:
        """Nothing: files are kept for resume and replay; the orchestrator reclaims what a checkpoint made superfluous."""

    def close(self) -> None:
        """Nothing is held open."""

    def _path(self, name: str) -> Path:
        """Where an announced file lies. Raises StreamError for a name that is no rollout file's or leads elsewhere."""
        parts = PurePosixPath(name).parts
        inside = self._run.rollouts.relative_to(self._run.path).parts
        match = FILE_NAME.fullmatch(parts[-1]) if len(parts) == len(inside) + 2 and parts[:-2] == inside else None
        if match is None or match["stem"] != KIND:
            raise StreamError(f"{name!r}: not the name of a rollout file of the run folder {self._run}")
        writer, file = parts[-2:]
        if writer not in self._folders:
            self._folders[writer] = _folder_of(self._run, writer)
        return self._folders[writer] / file


def rollout_files(run: RunFolder) -> dict[str, list[StreamFile]]:
    """Writer to its finished files, by attempt and sequence: one listing for the writers, one for the files of each. Once an
    attempt somebody lets go of what earlier ones left, once a checkpoint somebody reclaims what lies behind it. Nobody waits
    for rollouts in this way: new files are announced, and a late name is polled for by itself (see `read_published`).
    Whatever else lies there, links among it, is passed over. Raises OSError."""
    try:
        with os.scandir(run.rollouts) as entries:
            writers = sorted(e.name for e in entries if is_writer(e.name) and e.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return {}
    return {writer: [file for stem, file in list_published(run.rollouts / writer) if stem == KIND] for writer in writers}


def _folder_of(run: RunFolder, writer: str) -> Path:
    """Raises StreamError where the name is no writer's, or leads elsewhere."""
    folder = run.rollouts / check_writer(writer)
    if os.path.islink(folder):
        raise StreamError(f"{folder}: a link, not a folder")
    return folder


def _published(file: StreamFile, root: Path) -> Published:
    name = file.path.relative_to(root).as_posix()
    return Published(name, file.path.parent.name, file.attempt, file.sequence, file.bytes, file.checksum)
