"""What people ask of a run by files in its control folder: STOP and SAVE."""

import asyncio
import logging
import os
from collections.abc import Callable

from prl.control.tasks import thread_to_its_end
from prl.runfolder.paths import RunFolder

log = logging.getLogger(__name__)


async def watch_requests(
    run: RunFolder, every_s: float, *, stop: Callable[[str], None], save: Callable[[], None], saving: Callable[[], bool]
) -> None:
    """Look for the files until cancelled. `stop` is told why, as long as STOP is there; `save` once for each SAVE, which is
    taken away when that is not `saving` any more: an attempt that ends before leaves it to the next one. The folder is listed:
    a shared filesystem may remember for long that a name did not exist."""
    heard = taken = False  # of the SAVE that is there; one that cannot be taken away counts once
    try:
        while True:
            await asyncio.sleep(every_s)
            try:
                names = await thread_to_its_end(os.listdir, run.control)
            except OSError as error:
                log.warning("%s cannot be looked into for %s and %s: %s", run.control, run.stop.name, run.save.name, error)
                continue
            if run.stop.name in names:
                stop(f"asked to stop by {run.stop}")
            if run.save.name not in names:
                heard = taken = False
            elif not heard:
                heard = True
                log.warning("asked to save by %s", run.save)
                save()
            elif not taken and not saving():
                taken = True
                await thread_to_its_end(_take_away, run)
    finally:
        if heard and not taken and not saving():
            _take_away(run)


def _take_away(run: RunFolder) -> None:
    try:
        run.save.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s was done and cannot be removed: %s", run.save, error)
