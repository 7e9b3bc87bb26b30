"""Permissions as users have them, also where the tests run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """This process without root's rights; what lies in `folder`, which is pytest's, can be reached nevertheless."""
    before = os.geteuid()
    if before == 0:
        for parent in (folder, *list(folder.parents)[:3]):
            parent.chmod(parent.stat().st_mode | 0o555)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)
