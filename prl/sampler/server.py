"""vLLM's own OpenAI server in this process, with our guard, our routes and our weight-transfer engine.

vLLM is imported inside of functions: `prepare_environment` must come first, because it reads its environment at import.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from prl.sampler.options import SampleOptions
from prl.sampler.plugin import check_version
from prl.weights.options import WeightsOptions


@dataclass(frozen=True)
class Serving:
    """A running server; `ended` finishes when the HTTP server or vLLM's engine does, for whatever reason, or when the engine
    samples no token for too long."""

    url: str
    app: Any
    ended: asyncio.Task[str]


def prepare_environment(options: SampleOptions, host: str) -> bool:
    """Set what vLLM takes from the environment and return whether there is a GPU. Values that are set already are kept, so
    that a site can override them."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # torch reads it when it is imported
    import torch

    gpu = torch.cuda.is_available()
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": host,
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if not gpu:
        wanted |= {
            "TORCHDYNAMO_DISABLE": "1",  # else the first request with log-probs compiles for 16 s
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" pins two engines to one core
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # the engine does not import everything anew
        }
    if options.record_routing:
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the other one cannot
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    return gpu


@contextmanager
def private_sockets() -> Iterator[None]:
    """A private folder for the sockets between vLLM's processes, which ask for no token and which vLLM leaves behind; gone with
    the context. It lies where a site has set VLLM_RPC_BASE_PATH, or else among the temporary files: its path must be short,
    for a socket's may have 107 bytes."""
    name = "VLLM_RPC_BASE_PATH"
    # Mode 0700. What a dying process of vLLM's adds while the folder is removed is no reason to fail the run's end.
    with tempfile.TemporaryDirectory(prefix="prl-", dir=os.environ.get(name), ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        yield


def server_arguments(model: str, host: str, port: int, options: SampleOptions, gpu: bool, counts: bool = True) -> list[str]:
    """The command line of vLLM's server. `counts`: whether it counts requests and tokens. `engine_args` of the options come
    last and win: before the start it was checked that they touch nothing which prl relies on."""
    arguments: dict[str, str | int | float | bool] = {
        "model": model,
        "served-model-name": "policy",
        "host": host,
        "port": port,
        "dtype": options.dtype,
        "tensor-parallel-size": options.tensor_parallel,
        "max-model-len": options.max_model_len,
        "max-num-seqs": options.max_num_seqs,
        "gpu-memory-utilization": options.gpu_memory_utilization,
        "enforce-eager": options.enforce_eager or not gpu,
        "load-format": "dummy",  # the first version comes over the wire
        "generation-config": "vllm",  # no sampling defaults out of the model's folder
        "logprobs-mode": "processed_logprobs",
        "enable-scale-out": True,  # /inference/v1/generate
        "worker-extension-cls": "prl.sampler.extension.WorkerExtension",
        "weight-transfer-config": '{"backend": "prl"}',
        "disable-uvicorn-access-log": True,
    }
    if options.kv_cache_mib is not None:
        arguments["kv-cache-memory-bytes"] = options.kv_cache_mib * 2**20
    elif not gpu:
        raise ValueError("sample.kv_cache_mib is null: without a GPU vLLM would take nearly all memory; set it, e.g. to 64")
    if not counts:
        arguments["disable-log-stats"] = True
    if not gpu:
        arguments["async-scheduling"] = False  # with no device to keep busy it costs a tenth of the throughput
    if options.record_routing:
        arguments["enable-return-routed-experts"] = True
    if options.quantization != "none":
        arguments["quantization"] = options.quantization
    arguments |= dict(options.engine_args)
    return [word for name, value in arguments.items() for word in _words(name, value)]


def _words(name: str, value: str | float | bool) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else [f"--no-{name}"]
    return [f"--{name}", str(value)]


@asynccontextmanager
async def serving(arguments: list[str], token: str, weights: WeightsOptions, no_token_s: float) -> AsyncIterator[Serving]:
    """Start vLLM's engine and its HTTP server with our guard before every route; both end with the context. Raises RuntimeError
    where the samplers were not tested with this version of vLLM."""
    import vllm

    check_version(vllm.__version__)
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import setup_server

    from prl.sampler.generate import PATH, Generate
    from prl.sampler.middleware import Guard
    from prl.sampler.replica import Replica
    from prl.sampler.routes import add_routes

    args = _parse(arguments)
    address, listener = setup_server(args, reuse_port=False)  # the port is taken before the long start
    signal.signal(signal.SIGTERM, _interrupt)
    async with build_async_engine_client(args) as engine:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        replica = Replica(engine, weights)
        direct = {PATH: Generate(engine)}
        add_routes(app, replica, direct)
        guarded = Guard(app, token, replica, direct)  # around the whole application, so that nothing of vLLM's comes before it
        async with _http(app, guarded, listener, args) as server:
            ended = asyncio.create_task(_ended(server, engine, replica.silence(no_token_s)), name="serving")
            try:
                yield Serving(address, app, ended)
            finally:
                ended.cancel()


def _parse(arguments: list[str]) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser(description="vLLM's server under prl")).parse_args(arguments)
    validate_parsed_serve_args(args)
    return args


def _interrupt(signum: int, frame: Any) -> None:
    """Unwinds, so that the engine's processes end too."""
    raise SystemExit(128 + signum)


@asynccontextmanager
async def _http(app: Any, guarded: Any, listener: Any, args: Any) -> AsyncIterator["asyncio.Task[None]"]:
    """uvicorn without handlers of its own for signals; yields once it answers."""
    import uvicorn
    from vllm.entrypoints.launchers.launcher import NoSignalServer

    started = asyncio.Event()

    class Server(NoSignalServer):  # type: ignore[misc]
        async def startup(self, sockets: list[Any] | None = None) -> None:
            await super().startup(sockets)
            started.set()

    config = uvicorn.Config(guarded, log_level=args.uvicorn_log_level, access_log=False, timeout_keep_alive=600)
    server = Server(config)
    app.state.server = server  # vLLM's error handlers stop it when the engine is dead
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    waiter = asyncio.create_task(started.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        raise RuntimeError("vLLM's HTTP server ended while it started; its log is above") from task.exception()
    try:
        yield task
    finally:
        server.should_exit = True
        server.force_exit = True  # what is in flight at the end of a run is nobody's
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


async def _ended(server: "asyncio.Task[None]", engine: Any, silence: Coroutine[Any, Any, str]) -> str:
    """Waits for the first of them to end and says which; the task that takes the engine's outputs ends when it dies. An engine
    that stands still may answer /health; only its tokens show that it works."""
    outputs: asyncio.Task[None] = engine.output_handler
    silent = asyncio.create_task(silence, name="silence")
    try:
        done, _ = await asyncio.wait({server, outputs, silent}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        silent.cancel()
    if outputs in done or engine.errored:
        return "vLLM's engine died"
    return silent.result() if silent in done else "vLLM's HTTP server ended"
