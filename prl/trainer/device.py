"""The one place that knows whether there is a GPU. Without one it makes Megatron's hard-wired CUDA calls mean the CPU.

With CUDA `install` only picks this process's device. Without it, `torch.cuda.current_device`, `device="cuda"`, `.cuda()`,
type names, CUDA generators, streams and events stand for the CPU. The replacement of tensor functions holds for the thread
that called `install` alone, so Megatron must be driven from that thread.
"""

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
_CPU = torch.device("cpu")
log = logging.getLogger(__name__)
_installed = False


def device() -> torch.device:
    """Where this process's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def backend() -> str:
    """torch.distributed's backend for tensors on `device()`."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def initialises_on_cpu() -> bool:
    return not torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether Megatron's Transformer Engine layers can be used; otherwise the local ones of `prl.trainer.layers` are."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def attention(dtype: torch.dtype) -> str:
    """Which attention over packed sequences there is for this dtype: "transformer engine", torch's "varlen", or "sdpa", a call
    of torch's fused one for each bucket of lengths."""
    if has_transformer_engine():
        return "transformer engine"
    return "varlen" if torch.cuda.is_available() and dtype in (torch.bfloat16, torch.float16) else "sdpa"


def name() -> str:
    """The accelerator's, as its driver gives it; empty where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def take_peak_memory_bytes() -> int:
    """The most that this process's tensors took since the last call, on the accelerator; without one, the process's largest
    resident memory so far."""
    if not torch.cuda.is_available():
        # Not getrusage's: that begins with what the parent process had.
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Begin the work in a thread that nobody waits for at the end of the process. What it computes on an accelerator goes
    through a stream of its own, begins behind all that this thread has queued so far, and is done once there is a result."""
    result: Future[T] = Future()
    stream = _second_stream() if torch.cuda.is_available() else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())

    def done() -> T:
        if stream is None:
            return work()
        torch.cuda.set_device(stream.device)  # each thread has one of its own
        with torch.cuda.stream(stream):
            found = work()
            stream.synchronize()
        return found

    def run() -> None:
        try:
            result.set_result(done())
        except BaseException as error:  # whoever asks for the result gets it
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


@cache
def _second_stream() -> torch.cuda.Stream:
    # One for good: torch keeps memory that was freed on a stream for that stream.
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b of two matrices, in `dtype`: theirs, or float32 from half precision, not rounded in between."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in `total`'s dtype: that of a and b, or float32 where they are in half precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


AUTOGROUP_S = 5.0  # longest time to try to set it
AUTOGROUP_NICE = 10  # a tenth of a sampler's share of a core that both want


def install(threads: int, *, yields_cpu: bool = False) -> None:
    """Prepare this process (for good) and thread. Call before the first import of megatron; a second call does nothing.

    Where there is no GPU, `threads` is the number of CPU threads that torch may use, and `yields_cpu` has this thread and those
    it starts run only where nobody else wants the core.
    """
    global _installed
    if _installed:
        return
    _installed = True
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return
    torch.set_num_threads(threads)
    if yields_cpu:
        _yield_cpu()
    _replace_cuda_functions()
    _CudaMeansCpu().__enter__()  # type: ignore[no-untyped-call]


def _yield_cpu() -> None:
    """Samplers on the same cores should not wait for one when an update pauses them; the limit of the lag gives the trainers
    theirs. Threads that this process has already, as the heartbeat's, stay as they are."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Linux may give each session (a child of a run is one) an equal share, whatever its threads' priorities: sched(7).
    group = Path("/proc/self/autogroup")
    end = time.monotonic() + AUTOGROUP_S
    while group.exists():
        try:
            group.write_text(str(AUTOGROUP_NICE))
            return
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() > end:
                log.warning("%s cannot be set to %d, samplers may wait for a core: %s", group, AUTOGROUP_NICE, error)
                return
            time.sleep(0.05)  # users who are not root may do this ten times a second, all together


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if _is_cuda(options.get("device")):
            options["device"] = _CPU
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not options:
            name: str = func(*args)  # Megatron's optimizers compare it with "torch.cuda.FloatTensor"
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(a) else a for a in args)
        return func(*args, **options)


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (isinstance(value, torch.device) and value.type == "cuda")


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """Stands for torch.compile, as a call or as a decorator with options."""
    return model if model is not None else _not_compiled


class _InOrder:
    """Stands for a CUDA stream or event: on the CPU everything already happens in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., "_InOrder"]:
        return lambda *args, **kwargs: self

    def __enter__(self) -> "_InOrder":
        return self

    def __exit__(self, *error: object) -> None: ...


def _replace_cuda_functions() -> None:
    # One function object for each name: torch.compile registers a handler a function and refuses the same one twice.
    replacements: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda *args, **kwargs: None,
        "Stream": _InOrder,
        "Event": _InOrder,
        "current_stream": lambda *args, **kwargs: _InOrder(),
        "default_stream": lambda *args, **kwargs: _InOrder(),
        "stream": lambda *args, **kwargs: _InOrder(),
    }
    generators: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
    }
    for name, function in (replacements | generators).items():
        setattr(torch.cuda, name, function)
    for name, function in generators.items():
        setattr(torch.cuda.random, name, function)
    # Megatron decorates small functions with it as it is imported. Loading the compiler would take half of the start, and
    # compiling for the CPU costs more than it gains.
    torch.compile = _not_compiled

    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    from megatron.core.transformer.moe import token_dispatcher

    # How many tokens go to which rank: sizes that collectives want as numbers, which Megatron makes of what comes from a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )
