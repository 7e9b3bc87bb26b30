"""What people ask of a run by files in its control folder: STOP and SAVE."""

import asyncio
import logging
import os
from collections.abc import Callable

from prl.runfolder.paths import RunFolder

log = logging.getLogger(__name__)


async def watch_requests(run: RunFolder, every_s: float, *, stop: Callable[[str], None], save: Callable[[], None]) -> None:
    """Look for the files until cancelled. `stop` is told why, as long as STOP is there; `save` once for each SAVE, which is
    taken away when it has been seen. The folder is listed: a shared filesystem may remember for long that a name did not exist.
    """
    asked = False
    while True:
        await asyncio.sleep(every_s)
        try:
            names = await asyncio.to_thread(os.listdir, run.control)
        except OSError as error:
            log.warning("%s cannot be looked into for %s and %s: %s", run.control, run.stop.name, run.save.name, error)
            continue
        if run.stop.name in names:
            stop(f"asked to stop by {run.stop}")
        asks = run.save.name in names
        if asks and not asked:
            log.warning("asked to save by %s", run.save)
            save()
            await asyncio.to_thread(_take_away, run)
        asked = asks  # one that cannot be taken away counts once


def _take_away(run: RunFolder) -> None:
    try:
        run.save.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s was heard and cannot be removed: %s", run.save, error)
