"""Files that are either whole or not there, also for readers on other nodes and after a crash."""

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def publish(path: Path, data: bytes | Callable[[BinaryIO], None]) -> None:
    """Write `data` (bytes, or a function that writes to the open file) under a temporary name in the same folder, make it
    durable, and rename it to `path`. Readers ignore names with a leading dot. Raises OSError; nothing is left behind then."""
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                data(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def publish_json(path: Path, value: Any) -> None:
    publish(path, (json.dumps(value, indent=1) + "\n").encode())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
