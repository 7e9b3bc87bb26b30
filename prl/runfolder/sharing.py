"""Who may look into a run's folder besides its owner: nobody, or its Unix group.

The members of the group read all but the token, and make files in control/, such as STOP. The group is that of the folder in
which the run's lies, where that hands it on to what is made in it (setgid), else the owner's first one.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from prl.runfolder.paths import RunFolder

Share = Literal["owner", "group"]

_UMASK = 0o027
_FOLDER = 0o750
_CONTROL = 0o3770  # setgid, and sticky: nobody but the run's owner removes what another one has made, such as the token


@contextmanager
def file_modes(share: Share) -> Iterator[None]:
    """What this process, and all that it starts meanwhile, makes can be read by those who may, whatever the user's umask is."""
    before = os.umask(_UMASK) if share == "group" else None
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


def let_in(share: Share, run: RunFolder) -> None:
    """Open a folder that was made for its owner alone, with all that has to be there before others come."""
    if share == "group":
        run.control.chmod(_CONTROL)
        run.path.chmod(_FOLDER | run.path.stat().st_mode & stat.S_ISGID)
