"""Checkpoints of the trainer in Megatron's torch_dist form: model, optimizer, proximal policy (if there is one), step and the
digest of the reference (likewise), for any split over tensor, pipeline, expert and data parallelism.

A checkpoint folder, step_000100, holds them in `trainer/`; the orchestrator's manifest beside it makes it count. A save begins
with a copy in the host's memory, from which a thread writes the files while training goes on; Megatron's own asynchronous
writer is a forked process, which has more ways to go wrong beside threads, sockets and accelerators, and to be left behind.
"""

import gc
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from prl.config.resumed import FIXED_TRAIN_KEYS, model_changes
from prl.runfolder.manifest import Part, part_of
from prl.runfolder.publish import in_words
from prl.trainer.checkpoint_reader import InPlaceReader, read_ahead
from prl.trainer.engine import Engine
from prl.trainer.hf_folder import replace_folder, sync
from prl.trainer.optimizer_states import allocate, optimizer_states, set_step_count, step_count
from prl.trainer.parallel import Channel
from prl.trainer.reference import ProximalPolicy

_PART = "trainer"
_PROXIMAL = "proximal."  # before the names of the proximal policy's tensors
T = TypeVar("T")


class SaveError(Exception):
    """A checkpoint could not be written; raised on all ranks alike. The message says where and why."""


@dataclass(frozen=True)
class Save:
    """A checkpoint on its way."""

    step: int
    folder: Path
    began: float  # time.monotonic()
    plan: "_Plan"
    written: "Future[tuple[list[Any], list[Part]]]"  # by this rank: what .metadata says of its files, and the files
    given_up: threading.Event  # a thread that is stuck in one file then begins no other where the next save may be writing

    @property
    def temporary(self) -> Path:
        return self.folder / f".tmp-{_PART}"


class _Plan(strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's plan of who writes what, with the parts at hand that it would hide in its functions."""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> Any:
        self.writer, self.metadata, _ = planned
        return super()._get_save_and_finalize_callbacks(writer, planned, async_strategy)


def begin_save(engine: Engine, channel: Channel, folder: Path, step: int) -> Save:
    """Copy version `step` and begin to write the copy below `folder`. A collective of all ranks, to be followed by
    `finish_save`. Raises SaveError."""
    began = time.monotonic()
    plan = _Plan()
    temporary = folder / f".tmp-{_PART}"

    def make_folder() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    try:
        _on_all(channel, folder, make_folder)
        filesystem_async._results_queue = queue.SimpleQueue()  # else Megatron starts a process to hold one
        # As Megatron's `save` does it, which has rank 0 alone look into the folder: the others would wait for it in vain, if
        # it could not.
        sharded, common = save_preprocess(_state(engine, channel, step))
        sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=dist.get_rank())
        _on_all(channel, folder, lambda: plan.async_save(sharded, temporary, "mcore"))
        buckets = _on_all(channel, folder, lambda: _copied(plan.writer, _live_storages(engine)))
    except SaveError:
        _remove(folder, temporary)
        raise
    given_up = threading.Event()
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    written = pool.submit(_write, plan.writer, buckets, temporary, given_up)
    pool.shutdown(wait=False)
    return Save(step, folder, began, plan, written, given_up)


def finish_save(save: Save, channel: Channel, wait_s: float) -> list[Part]:
    """Wait at most `wait_s` until the files are written, and give them their name: durable when this returns. Returns all files
    of all ranks. A collective of all ranks; an older checkpoint of the name is replaced (it belongs to a lineage that was
    left). Raises SaveError."""
    leader = dist.get_rank() == 0

    def written() -> tuple[list[Any], list[Part]]:
        try:
            return save.written.result(wait_s)
        except TimeoutError:
            raise OSError(f"{save.folder}: its files were not written within {wait_s:.0f} s") from None

    try:
        results, parts = _on_all(channel, save.folder, written)
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(results, of_all if leader else None)

        def commit() -> list[Part]:
            if not leader:
                return []
            save.plan.writer.finish(save.plan.metadata, of_all)
            save_config(CheckpointingConfig(save.plan.backend, save.plan.version), str(save.temporary))
            index = [path for path in sorted(save.temporary.iterdir()) if not path.name.startswith("__")]
            found = [part_of(save.temporary, path) for path in index]
            (save.folder / "manifest.json").unlink(missing_ok=True)
            replace_folder(save.temporary, save.folder / _PART)
            return found

        parts = parts + _on_all(channel, save.folder, commit)
    except SaveError:
        save.given_up.set()
        _remove(save.folder, save.temporary)
        raise
    gathered = channel.gather([(f"{_PART}/{part.path}", part.bytes, part.checksum) for part in parts])
    return [Part(*part) for part in chain.from_iterable(gathered)]


def load_checkpoint(engine: Engine, folder: Path) -> int:
    """Restore what was saved; returns its step. A collective of all ranks.

    Raises FileNotFoundError where nothing was written, ValueError where it cannot be read or does not fit the engine.
    """
    part = folder / _PART
    if not part.is_dir():
        raise FileNotFoundError(f"{folder} is no checkpoint to resume from: it has no folder {_PART}/")
    with _reading(part):
        facts = dist_checkpointing.load_common_state_dict(str(part)).get("facts")
    if facts is None:
        raise ValueError(f"{folder} was written by another version of prl; submit the run anew")
    _check_fit(engine, facts, folder)
    count = int(facts["count"])
    if count:
        allocate(engine)
    proximal = engine.proximal if facts.get("proximal") else None
    wanted = _sharded(engine, proximal, is_loading=True, optimizer=count > 0)
    dict_list_map_inplace(_merged_in_place, wanted)
    # Not before: what was read above would wait behind all that is read ahead.
    with _reading(part), _in_place(), read_ahead(part, dist.get_rank()):
        state = dist_checkpointing.load(wanted, str(part))
    for key, gpt in _keyed(engine.gpts):
        gpt.load_state_dict(state[key])
    if proximal:
        for key, gpt in _keyed(proximal.gpts, _PROXIMAL):
            gpt.load_state_dict({name.removeprefix(_PROXIMAL): value for name, value in state[key].items()})
        proximal.known = True
    if count:
        set_step_count(engine, state["optimizer"], count)
        engine.optimizer.load_state_dict(state["optimizer"])
        for kept in optimizer_states(engine):
            # Else all parameters share one count, which rises with each of them; and what the host's memory has, where the
            # optimizer is there, are slices that keep all of what was read.
            for key in kept if engine.options.optimizer_offload else kept.keys() & {"step"}:
                if isinstance(kept[key], torch.Tensor):
                    kept[key] = kept[key].clone()
    else:
        engine.optimizer.reload_model_params()
    return int(facts["step"])


def _check_fit(engine: Engine, facts: dict[str, Any], folder: Path) -> None:
    """Raises ValueError where the engine is another one than the checkpoint's."""
    changes = model_changes(facts.get("model", {}), engine.config)  # earlier versions of prl did not write it
    if changes:
        raise ValueError(f"the model is another one than when {folder} was written: {changes}; restore its config.json")
    before, now = facts["reference"], _reference(engine)
    if before and now and before != now:
        raise ValueError(
            f"the initial policy, built again as the reference, has the digest {now}; it was {before} when {folder} was "
            f"written: restore the weights in the model's folder, and run.seed and train.dtype as they were"
        )
    for key in FIXED_TRAIN_KEYS:
        asked, was = getattr(engine.options, key), facts.get(key, False)
        if was != asked:
            raise ValueError(
                f"train.{key} = {asked}: it was {was} when {folder} was written, and the optimizer's state depends on "
                f"it: set it as it was"
            )


def _state(engine: Engine, channel: Channel, step: int) -> dict[str, Any]:
    # No rank has an optimizer's state before the first step, which every step so far may have failed to be.
    count = max(channel.gather(step_count(engine)))
    proximal = engine.proximal if engine.proximal and engine.proximal.known else None
    facts = {"step": step, "count": count, "reference": _reference(engine), "proximal": proximal is not None}
    facts |= {key: getattr(engine.options, key) for key in FIXED_TRAIN_KEYS}
    form = {key: value for key, value in _content().items() if key != "dp_cp_group"}
    state = {"facts": {**facts, "model": asdict(engine.config)}, "content_metadata": form}
    return state | _sharded(engine, proximal, is_loading=False, optimizer=count > 0)


def _sharded(engine: Engine, proximal: ProximalPolicy | None, *, is_loading: bool, optimizer: bool) -> dict[str, Any]:
    """Model, optimizer and proximal policy, or where they are to be put."""
    content = _content()
    state: dict[str, Any] = {key: gpt.sharded_state_dict(metadata=content) for key, gpt in _keyed(engine.gpts)}
    if optimizer:
        with _no_old_garbage():
            optimizers = engine.optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=content)
        state["optimizer"] = _local(optimizers)
    for key, gpt in _keyed(proximal.gpts, _PROXIMAL) if proximal else ():
        state[key] = gpt.sharded_state_dict(prefix=_PROXIMAL, metadata=content)
    return state


@contextmanager
def _no_old_garbage() -> Iterator[None]:
    """Megatron has garbage collected for each optimizer that data-parallel ranks share. What was there before is left out: it
    would take 0.2 s to go through all that was ever imported, a fourth of the time of loading 1 GB."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _merged_in_place(value: Any) -> Any:
    """A tensor that is saved in pieces (the two halves of a gated MLP's first layer) is whole once these have been read, where
    they are views of it. Megatron would put them together in new memory, for a third and more of the time of a load."""
    if not isinstance(value, ShardedTensorFactory):
        return value
    whole, merge = value.data, value.merge_fn

    def merged(pieces: Any) -> torch.Tensor:
        read, storage = list(nested_values(pieces)), whole.untyped_storage().data_ptr()
        views = all(piece.untyped_storage().data_ptr() == storage for piece in read)
        return whole if views and sum(piece.numel() for piece in read) == whole.numel() else cast(torch.Tensor, merge(pieces))

    return replace(value, merge_fn=merged)


def _local(value: Any) -> Any:
    """An optimizer's state of which tensors alone are saved: all else depends on the split, and is as it was built."""
    if isinstance(value, dict):
        return {key: _local(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_local(inner) for inner in value]
    return value if isinstance(value, ShardedBase | LocalNonpersistentObject) else LocalNonpersistentObject(value)


def _content() -> dict[str, Any]:
    """The form that can be loaded into any split; who saves and loads a distributed optimizer's state is in corrections.py."""
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _keyed(gpts: Sequence[GPTModel], prefix: str = "model") -> list[tuple[str, GPTModel]]:
    """This rank's chunks by their keys in the state."""
    return [(f"{prefix}{number}", gpt) for number, gpt in enumerate(gpts)]


def _reference(engine: Engine) -> str:
    """The digest of the reference; empty where there is none."""
    return str(engine.reference.digest) if engine.reference else ""


def _live_storages(engine: Engine) -> set[int]:
    """Addresses of all that a step changes."""
    tensors = chain(
        *((*gpt.parameters(), *gpt.buffers()) for gpt in engine.gpts),
        *(gpt.parameters() for gpt in (engine.proximal.gpts if engine.proximal else ())),
        *(group["params"] for group in engine.optimizer.param_groups),
        *(kept.values() for kept in optimizer_states(engine)),
    )
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}


def _copied(writer: Any, live: set[int]) -> list[Any]:
    """What the writer has to write, in memory of the host that no step changes."""
    buckets = writer.preload_tensors(writer.write_buckets) if writer.write_buckets else []  # copies from accelerators alone
    writer.write_buckets = None

    def steady(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor

    return [(path, key, (data, [(item, steady(tensor)) for item, tensor in tensors])) for path, key, (data, tensors) in buckets]


def _write(writer: Any, buckets: list[Any], folder: Path, given_up: threading.Event) -> tuple[list[Any], list[Part]]:
    """In a thread: all files of this rank, durable, with their checksums."""
    results: list[Any] = []
    parts = []
    for number, bucket in enumerate(buckets):
        if given_up.is_set():
            break
        _, written = writer.write_preloaded_data([writer.transforms], number, bucket, None, None, use_fsync=True)
        if isinstance(written, Exception):
            raise written
        results += written
        sync(Path(bucket[0]))  # each node must write back its own; Megatron's fsync comes before the last bytes
        parts.append(part_of(folder, Path(bucket[0])))
    return results, parts


def _on_all(channel: Channel, folder: Path, work: Callable[[], T]) -> T:
    """Do something on every rank; where it fails on one of them, SaveError on all."""
    words, result = "", None
    try:
        result = work()
    except (Exception, CheckpointException) as error:
        words = in_words(_cause(error), folder)
    failed = [said for said in channel.gather(words) if said]
    if failed:
        raise SaveError(f"{folder}: the checkpoint could not be written: {failed[0]}")
    return cast(T, result)


def _remove(folder: Path, temporary: Path) -> None:
    """What a save that failed leaves."""
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _in_place() -> Iterator[None]:
    """Megatron loads by our reader; it lets nobody choose one."""
    megatrons = strategies._get_filesystem_reader
    strategies._get_filesystem_reader = lambda folder, **options: InPlaceReader(folder)
    try:
        yield
    finally:
        strategies._get_filesystem_reader = megatrons


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """ValueError, which says what is wrong in a line, for all that comes of files that are missing or damaged."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause = _cause(error)
        raise ValueError(f"{folder} cannot be read: {type(cause).__name__}: {cause}") from error


def _cause(error: BaseException) -> BaseException:
    """torch wraps what failed, on whichever rank, in an exception that is no Exception and says it in many lines."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return error
