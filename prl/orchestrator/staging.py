"""What a node has on a disk of its own under Slurm: a copy of the model, so that its processes do not all read the one that all
nodes share, and the caches of compilers, which would disturb each other on a shared filesystem. It goes with the agent."""

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from prl.cluster.mounts import DISKS, LOCAL, mount_of, mounted
from prl.cluster.preflight.measure import in_thread
from prl.cluster.split import kind_of
from prl.config.hf_config import UnsupportedModelError
from prl.config.model_files import files_read
from prl.config.schema import Config
from prl.control.client import ControlClient

COPIES = 4  # files at a time
CHUNK_BYTES = 16 << 20  # after which a copy may be given up
LEAST_BYTES_PER_S = 25e6  # a copy that is slower on the whole is given up
LEAST_COPY_S = 60.0
CACHES: Mapping[str, str] = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}


@dataclass(frozen=True)
class StageOrders:
    """What the orchestrator tells every node's agent."""

    folder: str | None  # where, as cluster.local_folder names it
    stage: Literal["auto", "always", "never"]  # the model
    weights: bool  # trainers read them, too
    limit_s: float  # of the copy
    spare_bytes: int  # that it has to leave


@dataclass(frozen=True)
class Staged:
    """`copied_bytes` are 0 where nothing was copied, either since nothing had to be, or for the reason in `obstacle`."""

    model: Path  # where the node's processes read it
    copied_bytes: int = 0
    obstacle: str = ""

    def __str__(self) -> str:
        if self.obstacle:
            return f"the model is read from {self.model}: {self.obstacle}"
        return f"the model is read from {self.model}" + (f" ({_gib(self.copied_bytes)} copied)" if self.copied_bytes else "")


class GivenUp(Exception):
    """The copy took too long, or nobody wants it any more."""


class Obstacle(Exception):
    """Why a node reads the model that all nodes share; the message says what it is and which key may help."""


def stage_orders(config: Config, model: Path, *, resumes: bool) -> StageOrders | None:
    """None without Slurm: everything is on this machine, and what is cached is kept. `resumes`: trainers begin at a checkpoint,
    so that they need no weights of the model but for a reference."""
    if kind_of(config) == "local":
        return None
    weights = config.model.init == "pretrained" and (not resumes or config.train.reference == "initial")
    stage = config.cluster.stage_model
    size_bytes = 0 if stage == "never" else sum(path.stat().st_size for path in files_read(model, weights=weights))
    limit_s = LEAST_COPY_S + size_bytes / LEAST_BYTES_PER_S
    spare_bytes = int(config.cluster.preflight.disk_gib * 2**30)
    return StageOrders(config.cluster.local_folder, stage, weights, limit_s, spare_bytes)


def local_folder(orders: StageOrders, prefix: str) -> AbstractContextManager[str]:
    """A folder of this agent's alone on the node's disk, which goes with the context. Raises OSError."""
    parent = _parent(orders.folder)
    parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)


def _parent(named: str | None) -> Path:
    """Variables in the name are those of the node."""
    if named is None:
        return Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    path = Path(os.path.expandvars(named)).expanduser()
    if "$" in str(path) or not path.is_absolute():
        raise FileNotFoundError(f"cluster.local_folder = {named}: is no absolute path on this node, but {path}")
    return path


def cache_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which what is compiled on this node is kept in `folder`; what is set already stays."""
    return {name: str(folder / place) for name, place in CACHES.items() if name not in environment}


async def stage(client: ControlClient, model: Path, folder: Path, orders: StageOrders, *, weights: bool) -> Staged:
    """`stage_model` in a thread, given up at its deadline, and as soon as the run stops."""
    given_up = threading.Event()
    client.progress("copying the model to this node's disk")
    work = partial(stage_model, model, folder, orders, mounted, weights=weights, given_up=given_up)
    copying = asyncio.create_task(in_thread(work, orders.limit_s), name="the copy of the model")
    stopping = asyncio.create_task(client.stopping.wait())
    try:
        await asyncio.wait({copying, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        given_up.set()
        stopping.cancel()
        copying.cancel()
    try:
        return await copying
    except asyncio.CancelledError:
        return Staged(model, obstacle="the run stops")
    except TimeoutError:
        return Staged(model, obstacle=f"the copy was not done within {orders.limit_s:.0f} s")


def stage_model(
    source: Path,
    folder: Path,
    orders: StageOrders,
    mounts: Callable[[], list[tuple[str, str]]],
    *,
    weights: bool,
    given_up: threading.Event,
) -> Staged:
    """Copy the model into the new folder `folder`, whole or not at all: what a run reads of it, of its `weights` only where
    trainers of this node read them. All else there is a link to the model that all nodes share, which is what the node's
    processes read where nothing is copied. `mounts` as `mounted`. Raises GivenUp."""
    if orders.stage == "never":
        return Staged(source)
    try:
        source, known = source.resolve(strict=True), mounts()
        if orders.stage == "auto":
            if mount_of(source, known)[1] in LOCAL:
                return Staged(source)
            kind = mount_of(folder.parent, known)[1]
            if kind not in DISKS:
                raise Obstacle(f"{folder.parent} lies on no disk of the node ({kind or 'unknown'}): see cluster.local_folder")
        files = files_read(source, weights=weights and orders.weights)
        size_bytes = sum(path.stat().st_size for path in files)
        _check_room(folder.parent, size_bytes, orders.spare_bytes)
        _copy(source, folder, files, given_up)
    except Obstacle as error:
        return Staged(source, obstacle=str(error))
    except (OSError, UnsupportedModelError) as error:
        return Staged(source, obstacle=f"{type(error).__name__}: {error}")
    return Staged(folder, size_bytes)


def _check_room(folder: Path, size_bytes: int, spare_bytes: int) -> None:
    """Raises Obstacle."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < size_bytes + spare_bytes:
        raise Obstacle(
            f"{_gib(free_bytes)} are free in {folder}, and {_gib(size_bytes)} are wanted, with {_gib(spare_bytes)} to spare "
            f"(cluster.preflight.disk_gib): see cluster.local_folder"
        )


def _copy(source: Path, folder: Path, files: list[Path], given_up: threading.Event) -> None:
    """Raises OSError and GivenUp, after which nothing of it is left."""
    temporary = folder.with_name(f".{folder.name}")
    temporary.mkdir()
    try:
        with ThreadPoolExecutor(COPIES, thread_name_prefix="copy") as pool:
            copies = [pool.submit(_copy_file, path, temporary / path.name, given_up) for path in files]
            try:
                for copy in copies:
                    copy.result()
            except BaseException:
                given_up.set()  # nobody needs the others
                raise
        for path in source.iterdir():
            if path not in files:
                (temporary / path.name).symlink_to(path)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _copy_file(source: Path, target: Path, given_up: threading.Event) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with source.open("rb", buffering=0) as reader, target.open("xb") as writer:
        while (count := reader.readinto(buffer)) != 0:
            if given_up.is_set():
                raise GivenUp
            writer.write(buffer[:count])
    there, here = source.stat().st_size, target.stat().st_size
    if here != there:
        raise OSError(f"{target}: has {here} bytes of the {there} of {source}")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
