"""A sampler: vLLM's server, started by the node agent as `python -m prl.sampler`."""

import asyncio
import os
from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from prl.control.child import Child, run_child
from prl.control.client import ControlClient
from prl.metrics import names
from prl.metrics.events import MetricsWriter
from prl.sampler.server import Serving, prepare_environment, private_sockets, server_arguments, serving


async def main(child: Child, client: ControlClient) -> None:
    options = child.config.sample
    if child.port is None:
        raise ValueError("PRL_PORT is not set: a sampler needs a port to serve on")
    gpu = prepare_environment(options, child.host)
    arguments = server_arguments(str(child.model), child.host, child.port, options, gpu, child.config.metrics.engine)
    with _metrics(child) as metrics, private_sockets():
        async with serving(arguments, child.token, child.config.weights, options.no_token_s) as server:
            await client.join({"url": server.url, "workers": options.tensor_parallel})
            client.progress("serving")
            await _serve(server, client, metrics, child.config.metrics.report_s)


def _metrics(child: Child) -> AbstractContextManager[MetricsWriter | None]:
    """For what vLLM counts, where that is wanted."""
    if not child.config.metrics.engine:
        return nullcontext()
    return MetricsWriter(child.run.metrics, child.role, child.index, child.attempt, flush_s=child.config.metrics.flush_s)


async def _serve(server: Serving, client: ControlClient, metrics: MetricsWriter | None, report_s: float) -> None:
    """Until the run ends. Raises RuntimeError where the server does before."""
    stopping = asyncio.create_task(client.stopping.wait())
    ends = {stopping, server.ended}
    if metrics is not None:
        await _count(ends, metrics, report_s)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if server.ended.done():
        raise RuntimeError(f"{server.ended.result()}: see this process's log")


async def _count(ends: Set[asyncio.Future[Any]], metrics: MetricsWriter, report_s: float) -> None:
    """Write what vLLM counts until one of these is done, and then once more."""
    from prl.sampler.counts import EngineCounts

    counts, ended = EngineCounts(), False
    while not ended:
        ended = bool((await asyncio.wait(ends, timeout=report_s, return_when=asyncio.FIRST_COMPLETED))[0])
        metrics.write(counts.look(), kind=names.ENGINE)


if __name__ == "__main__":
    os.umask(0o077)  # vLLM's sockets between its processes know no token: they are the user's alone
    run_child(main)
