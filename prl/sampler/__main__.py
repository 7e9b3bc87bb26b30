"""A sampler: vLLM's server, started by the node agent as `python -m prl.sampler`."""

import asyncio
import os

from prl.control.child import Child, run_child
from prl.control.client import ControlClient
from prl.sampler.server import Serving, prepare_environment, private_sockets, server_arguments, serving


async def main(child: Child, client: ControlClient) -> None:
    options = child.config.sample
    if child.port is None:
        raise ValueError("PRL_PORT is not set: a sampler needs a port to serve on")
    gpu = prepare_environment(options, child.host)
    arguments = server_arguments(str(child.model), child.host, child.port, options, gpu)
    with private_sockets():
        async with serving(arguments, child.token, child.config.weights, options.no_token_s) as server:
            await _serve(server, client, options.tensor_parallel)


async def _serve(server: Serving, client: ControlClient, workers: int) -> None:
    """Until the run ends. Raises RuntimeError where the server does before."""
    await client.join({"url": server.url, "workers": workers})
    client.progress("serving")
    stopping = asyncio.create_task(client.stopping.wait())
    await asyncio.wait({stopping, server.ended}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if server.ended.done():
        raise RuntimeError(f"{server.ended.result()}: see this process's log")


if __name__ == "__main__":
    os.umask(0o077)  # vLLM's sockets between its processes know no token: they are the user's alone
    run_child(main)
