"""How files lie on a parallel filesystem."""

import logging
import shutil
import subprocess
from pathlib import Path

_TIMEOUT_S = 10.0
log = logging.getLogger(__name__)


def stripe(folder: Path, targets: int) -> None:
    """Have each new file of a folder, and of those made in it, lie on so many storage targets: `lfs setstripe -c`. One suits
    files of a few MiB, several those of many GiB. Nothing happens where there is no `lfs`; where it fails (the folder is on
    another filesystem), the log says so."""
    lfs = shutil.which("lfs")
    if lfs is None:
        return
    try:
        subprocess.run(
            [lfs, "setstripe", "-c", str(targets), str(folder)],
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        log.info("%s: lfs setstripe: %s", folder, error.stderr.decode(errors="replace").strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s: lfs setstripe: %s", folder, error)
