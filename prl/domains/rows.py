"""Files of problems."""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prl.domains.api import DomainError


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a .parquet, .jsonl or .jsonl.gz file. Raises DomainError with its path."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet  # half a second that only parquet files should cost

            yield from pyarrow.parquet.read_table(path).to_pylist()
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
                for line in file:
                    if line.strip():
                        yield json.loads(line)
        else:
            raise DomainError(f"{path}: expected a file ending in .parquet, .jsonl or .jsonl.gz")
    except (OSError, ValueError) as error:
        raise DomainError(f"{path}: not readable as {path.suffix}: {error}") from error
