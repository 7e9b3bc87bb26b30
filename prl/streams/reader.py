"""Reading of rollouts."""

from pathlib import Path

from prl.streams.files import open_arrow, read_checked
from prl.streams.records import Group
from prl.streams.rollouts import KIND, SCHEMA, from_arrow


def read_rollouts(path: Path, size_bytes: int, checksum: str, *, run: str | None = None, wait_s: float = 0.0) -> list[Group]:
    """The groups of a rollout file; their token arrays are read-only views of the file's bytes. `run`, where given, has to be
    the run that wrote it; `wait_s` is how long the name may take to show (see `read_checked`). Raises StreamError for anything
    but the whole file that was announced."""
    data = read_checked(path, size_bytes, checksum, wait_s=wait_s)
    batches, _ = open_arrow(path, data, KIND, SCHEMA, run)
    return [group for batch in batches for group in from_arrow(batch, path)]
