"""Tasks that leave nothing behind them: whoever has seen one end may rely on it that nothing of it goes on in a thread."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that is not to be broken off. Where the task that awaits it is cancelled, it ends only once the work has."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        error = None if running.cancelled() else running.exception()
        if error is not None:
            log.warning("nobody waits any more for what failed: %r", error)
        raise


async def thread_to_its_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """asyncio.to_thread for what changes files: the thread goes on when its task is cancelled, and its end is awaited."""
    return await to_its_end(asyncio.to_thread(work, *args, **kwargs))


async def end_tasks(tasks: Collection["asyncio.Task[Any]"], limit_s: float) -> None:
    """Cancel tasks, and return once all have ended. Raises TimeoutError with the names of those that have not in time."""
    for task in tasks:
        task.cancel()
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        if late:
            names = ", ".join(sorted(task.get_name() for task in late))
            raise TimeoutError(f"not ended within {limit_s:g} s: {names}")
