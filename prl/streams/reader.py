"""Reading of rollouts."""

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa

from prl.flow.versions import Version
from prl.streams.contract import Cursor, Published, Source, behind
from prl.streams.files import Header, StreamError, check_tokens, open_arrow, read_checked
from prl.streams.records import Group
from prl.streams.rollouts import KIND, SCHEMA
from prl.streams.rows import Rows, rows_of, to_groups


class RolloutReader:
    """The rollout streams of all writers of a run. Readers do not know of each other: each has its own cursor."""

    def __init__(self, store: Source, run: str, vocabulary: int | None = None) -> None:
        """`run` is the run that has to have written the entries; `vocabulary` how many tokens its model knows, where somebody
        trains on them."""
        self.unreadable = 0  # entries set aside
        self._store = store
        self._run = run
        self._vocabulary = vocabulary

    def read(self, entry: Published, wait_s: float = 0.0, newest: Version | None = None) -> list[Group]:
        """The groups of an entry; their token arrays are read-only views of its bytes. See `rows`."""
        return [group for rows in self.rows(entry, wait_s, newest) for group in to_groups(rows)]

    def rows(self, entry: Published, wait_s: float = 0.0, newest: Version | None = None) -> list[Rows]:
        """What is in an entry, flat. `wait_s` is how long a new name may take to show; `newest`, where given, the latest
        version of the run that can have sampled it. Raises StreamError where it cannot be read; it is set aside and counted
        then."""
        try:
            rows, header = rows_in(self._store.fetch(entry, wait_s), entry.name, self._run, self._vocabulary)
            if (header.writer, header.sequence) != (entry.writer, entry.sequence):
                raise StreamError(f"{entry.name}: it is number {header.sequence} of {header.writer!r}, says its header")
            if newest is not None and any(_is_later(found, newest) for found in rows):
                raise StreamError(f"{entry.name}: sampled by a version later than {newest}, which does not exist yet")
            return rows
        except StreamError:
            self.unreadable += 1
            self._store.set_aside(entry)
            raise

    def entries(self) -> list[Published]:
        """All that there is, by looking: for who comes later. Who reads while others write goes by announcements, since a
        shared filesystem shows names late, and not in their order."""
        return list(self._store.entries())

    def release_before(self, attempt: int) -> None:
        """What earlier attempts have left is done with: its groups have ended, or are sampled again."""
        self._store.release(behind(entry for entry in self._store.entries() if entry.attempt < attempt))

    def release(self, cursor: Cursor, held: Collection[Published] = ()) -> None:
        """Entries up to the cursor, but for those `held`, are done with for everyone: a bounded store makes room."""
        self._store.release(cursor, held)

    def close(self) -> None:
        self._store.close()


def _is_later(rows: Rows, newest: Version) -> bool:
    versions = rows.column["versions"].values
    lineage, step = (versions.field(name).to_numpy() for name in ("lineage", "step"))
    return bool(((lineage == newest.lineage) & (step > newest.step)).any())


def read_rollouts(path: Path, size_bytes: int, checksum: str, *, run: str | None = None, wait_s: float = 0.0) -> list[Group]:
    """The groups of a rollout file, wherever it lies. See `read_rows`."""
    return [group for rows in read_rows(path, size_bytes, checksum, run=run, wait_s=wait_s) for group in to_groups(rows)]


def read_rows(
    path: Path,
    size_bytes: int,
    checksum: str,
    *,
    run: str | None = None,
    vocabulary: int | None = None,
    wait_s: float = 0.0,
) -> list[Rows]:
    """What is in a rollout file, flat. `run`, where given, has to be the run that wrote it, `vocabulary` is how many tokens its
    model knows; `wait_s` is how long the name may take to show (see `read_checked`). Raises StreamError for anything but the
    whole file that was announced."""
    rows, _ = rows_in(read_checked(path, size_bytes, checksum, wait_s=wait_s), path, run, vocabulary)
    return rows


def rows_in(data: pa.Buffer, where: object, run: str | None, vocabulary: int | None = None) -> tuple[list[Rows], Header]:
    """What is in the bytes of an entry. Raises StreamError where they are no rollouts, of another run or of another model."""
    opened = open_arrow(where, data, KIND, SCHEMA, run)
    found = [rows_of(batch, where) for batch in opened.batches if batch.num_rows]
    for rows in found:
        check_tokens(where, rows.prompt_ids, vocabulary)
        check_tokens(where, rows.output_ids, vocabulary)
    return found, opened.header
