"""Files of problems."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prl.domains.api import DomainError


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a .parquet, .jsonl or .jsonl.gz file, read as they are asked for. Raises DomainError with its path."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet  # half a second that only parquet files should cost

            with pyarrow.parquet.ParquetFile(path) as table:
                for batch in table.iter_batches(batch_size=1024):
                    yield from batch.to_pylist()
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _row(line, number)
        else:
            raise DomainError(f"{path}: expected a file ending in .parquet, .jsonl or .jsonl.gz")
    except (OSError, EOFError, ValueError, NotImplementedError, RecursionError, zlib.error) as error:
        raise DomainError(f"{path}: not readable as {path.suffix}: {error}") from error


def _row(line: str, number: int) -> Mapping[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is no object with keys and values")  # noqa: TRY004 (told as the others are)
    return row
