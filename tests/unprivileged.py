"""Permissions as users have them, also where the tests run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def unprivileged(folder: Path, *, stranger: bool = False) -> Iterator[None]:
    """This process without root's rights, though in its group unless it is a stranger; what lies in `folder`, which is
    pytest's, can be reached nevertheless."""
    user, group, groups = os.geteuid(), os.getegid(), os.getgroups()
    if user == 0:
        for parent in (folder, *list(folder.parents)[:3]):
            parent.chmod(parent.stat().st_mode | 0o555)
        if stranger:
            os.setgroups([])
            os.setegid(NOBODY)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        if stranger and user == 0:
            os.setegid(group)
            os.setgroups(groups)
