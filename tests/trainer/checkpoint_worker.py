"""One rank of the tests of checkpoints: `checkpoint_worker.py FOLDER`, for one rank and then for two. Rank 0 writes what came
out to FOLDER/ranks_<n>/<name>.npz for the tests to judge."""

import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "faults" / "inject"))
sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_layouts import DENSE, LAYOUTS, OPTIONS, PLAIN, RECENT, SHARED, VALUES, origins
from fault_layer import WRITES, FaultLayer, Operation
from ranks import rank_environment
from trained import steps

from prl.control.ports import free_port
from prl.runfolder.manifest import Manifest, newest_manifest, write_manifest
from prl.runfolder.paths import RunFolder
from prl.trainer.options import TrainOptions


class Killed(BaseException):
    """Stands for the end of the process: nothing else is done to the filesystem."""


def main(folder: Path) -> None:
    from prl.trainer import device

    device.install(1)
    import torch
    from resumes import engine_of, relayout, resumed, save, went_on
    from torch.distributed.checkpoint import filesystem

    from prl.trainer.checkpoint import SaveError, _write, begin_save, finish_save, load_checkpoint
    from prl.trainer.engine import Engine, build_engine
    from prl.trainer.mapping import export_weights
    from prl.trainer.model import build_model
    from prl.trainer.parallel import Channel, start_groups, stop_groups

    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    results = folder / f"ranks_{ranks}"
    start_groups(replace(PLAIN, tensor_parallel=ranks), timeout_s=60.0)
    channel = Channel(60.0)

    def report(name: str, values: dict[str, np.ndarray]) -> None:
        if rank == 0:
            np.savez(results / f"{name}.npz", **values)

    def weights(engine: Engine) -> dict[str, np.ndarray]:
        return {name: tensor.float().numpy().copy() for name, tensor in export_weights(engine.chunks, engine.config)}

    def save_in(model: str, layout: str, options: TrainOptions) -> None:
        report(f"went_on_{model}_{layout}", went_on(model, options, channel, results / model / layout))

    def resume_in(model: str, layout: str, options: TrainOptions, saved_by: int, saved_as: str) -> None:
        found = resumed(model, options, folder / f"ranks_{saved_by}" / model / saved_as)
        report(f"resumed_{model}_{layout}_from_{saved_by}_{saved_as}", found)

    def layouts() -> None:
        for model, splits in LAYOUTS.items():
            for layout, split in splits.items():
                options = replace(OPTIONS[model], **split)
                relayout(options, channel)
                save_in(model, layout, options)
                if model == "dense" and layout in ("stages", "data"):
                    skipped(layout, options)
            for layout, split in splits.items():
                options = replace(OPTIONS[model], **split)
                relayout(options, channel)
                for origin in origins(model, layout):
                    resume_in(model, layout, options, *origin)
        refused()

    def refused() -> None:
        words = {}
        for key, options in (
            ("distributed_optimizer", PLAIN),
            ("dtype", replace(PLAIN, dtype="bfloat16")),
            ("value_head", VALUES),
        ):
            relayout(options, channel)
            try:
                saved = "data_shared" if key == "distributed_optimizer" else "data"
                load_checkpoint(engine_of(options), results / "dense" / saved)
            except ValueError as error:
                words[key] = np.array(str(error))
        report("refused", words)

    def shrunk() -> None:
        """One rank goes on from what two have saved in each of their splits."""
        for model, splits in LAYOUTS.items():
            for layout in splits:
                name, split = ("one_shared", SHARED) if layout.endswith("_shared") else ("one", {})
                resume_in(model, name, replace(OPTIONS[model], **split), 2, layout)

    def copies() -> None:
        """What is saved is the version of the save's beginning, whatever is trained while it is written."""
        for name, options in (
            ("float32", PLAIN),
            ("bfloat16", replace(PLAIN, dtype="bfloat16")),
            ("values", replace(VALUES, dtype="bfloat16", **SHARED)),
            ("shared", replace(PLAIN, **SHARED)),
            ("proximal", RECENT),
        ):
            engine = engine_of(options)
            steps(engine, 1, 2)
            path, begun, go_on = results / f"copied_{name}", threading.Event(), threading.Event()

            def wait(operation: Operation, begun=begun, go_on=go_on) -> None:
                if operation.kind == "write" and ".distcp" in operation.path:
                    begun.set()
                    assert go_on.wait(60.0)

            with FaultLayer(path, wait):
                under_way = begin_save(engine, channel, path, 2)
                assert begun.wait(60.0)
                went_on = steps(engine, 3, 4)
                done_early = under_way.written.done()
                go_on.set()
                finish_save(under_way, channel, 120.0)
            fresh = engine_of(options)
            load_checkpoint(fresh, path)
            report(f"copied_{name}", {"went_on": went_on, "resumed": steps(fresh, 3, 4), "early": np.array(done_early)})

    def with_and_without_proximal() -> None:
        """A checkpoint without the policy before for a run that asks for it, and one with it for a run that does not."""
        found = {}
        for name, options, saved in (("asked", RECENT, "dense"), ("unasked", PLAIN, "proximal")):
            engine = engine_of(options)
            load_checkpoint(engine, results / saved / "one")
            found[name] = steps(engine, 3, 4)
        # Steps of a policy that is its own predecessor: what the first one has to be, and what another would not be.
        for name, saved in (("own", "dense"), ("own_instead", "proximal")):
            engine = engine_of(RECENT)
            load_checkpoint(engine, results / saved / "one")
            assert engine.proximal is not None
            engine.proximal.take(engine.chunks)
            found[name] = steps(engine, 3, 4)
        report("other_proximal", found)

    def skipped(layout: str, split: TrainOptions) -> None:
        """A step without a finite gradient, among others and as the first one; each followed by a save."""
        half = replace(split, dtype="bfloat16")
        for name, options in ((f"skipped_{layout}", split), (f"skipped_{layout}_half", half))[: 2 if layout == "data" else 1]:
            engine = engine_of(options)
            found = {"first": steps(engine, 1), "before": weights(engine)["model.norm.weight"]}
            whole = weights(engine)
            found["skip"] = steps(engine, 2, broken=True)
            found["same"] = np.array(all(np.array_equal(value, whole[key]) for key, value in weights(engine).items()))
            save(engine, channel, results / name, 2)
            found["then"] = steps(engine, 3, 4)
            fresh = engine_of(options)
            load_checkpoint(fresh, results / name)
            found["resumed"] = steps(fresh, 3, 4)

            bare = engine_of(options)
            found["only"] = steps(bare, 1, broken=True)
            save(bare, channel, results / f"{name}_only", 1)
            found["only_then"] = steps(bare, 2, 3)
            fresh = engine_of(options)
            load_checkpoint(fresh, results / f"{name}_only")
            found["only_resumed"] = steps(fresh, 2, 3)
            report(name, found)

    def other_options() -> None:
        """What an attempt is told goes before what the checkpoint was written with."""
        engine = engine_of(PLAIN)
        steps(engine, 1, 2)
        save(engine, channel, results / "told", 2)
        told = replace(PLAIN, learning_rate=2e-3, beta1=0.8, beta2=0.9, epsilon=1e-7, weight_decay=0.1)
        fresh = engine_of(told)
        load_checkpoint(fresh, results / "told")
        steps(fresh, 3)
        groups = fresh.optimizer.param_groups
        found = {key: np.array([group[key] for group in groups]) for key in ("lr", "betas", "eps", "weight_decay")}
        report("other_options", found)

    def unreadable() -> None:
        """Each file of a checkpoint missing, empty or half there; and the checkpoint of another model."""
        whole, engine, words = results / "dense" / "one", engine_of(PLAIN), {}

        def refused(engine: Engine, checkpoint: Path) -> np.ndarray:
            try:
                load_checkpoint(engine, checkpoint)
            except ValueError as error:
                return np.array(str(error))
            raise AssertionError(checkpoint)

        for name in (".metadata", "__0_0.distcp", "metadata.json"):
            for kind in ("missing", "empty", "half"):
                folder = results / f"{kind}{name}"
                shutil.copytree(whole, folder)
                file = folder / "trainer" / name
                content = file.read_bytes()
                file.write_bytes(content[: len(content) // 2 if kind == "half" else 0])
                if kind == "missing":
                    file.unlink()
                words[f"{kind} {name}"] = refused(engine, folder)
        for key, model in (
            ("rope_theta", replace(DENSE, rope_theta=5.0)),
            ("architecture", replace(DENSE, architecture="llama")),
            ("vocabulary", replace(DENSE, vocabulary=DENSE.vocabulary + 1)),
            ("layers", replace(DENSE, layers=2)),
        ):
            words[key] = refused(build_engine(build_model(model, PLAIN), model, PLAIN), whole)
        report("unreadable", words)

    def unplanned() -> None:
        """A save that fails in torch, while ranks agree on who writes what."""
        engine, path = engine_of(PLAIN), results / "unplanned"
        prepare = filesystem.FileSystem.mkdir

        def fail(self: object, place: Path) -> None:
            raise PermissionError(13, "Permission denied", str(place))

        filesystem.FileSystem.mkdir = fail
        try:
            save(engine, channel, path, 1)
            words = "saved"
        except SaveError as error:
            words = str(error)
        finally:
            filesystem.FileSystem.mkdir = prepare
        left = path.exists()
        save(engine, channel, path, 1)
        report("unplanned", {"words": np.array(words), "left": np.array(left)})

    def given_up() -> None:
        """A save for which nobody waits any more, held in its first file, has a second one to write."""
        under_way = begin_save(engine_of(PLAIN), channel, results / "given_up", 1)
        under_way.written.result(60.0)
        begun, go_on = threading.Event(), threading.Event()
        opened: list[Path] = []

        class Writer:
            transforms = None

            def write_preloaded_data(self, transforms, number, bucket, *rest, **options):  # type: ignore[no-untyped-def]
                opened.append(bucket[0])
                begun.set()
                assert go_on.wait(60.0)
                bucket[0].write_text("content")
                return number, []

        files = [under_way.temporary / name for name in ("first", "second")]
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(_write, Writer(), [(file,) for file in files], under_way.temporary, under_way.given_up)
            assert begun.wait(60.0)
            late = replace(under_way, written=written)
            try:
                finish_save(late, channel, 0.1)
                words = "saved"
            except SaveError as error:
                words = str(error)
            under_way.temporary.mkdir(parents=True)  # by the next save
            go_on.set()
        report("given_up", {"words": np.array(words), "opened": np.array([file.name for file in opened])})

    def other_value_rate() -> None:
        """A value head's rate before, and as an attempt is told that resumes, beside the head's steps."""
        for name, split in (("plain", {}), ("shared", SHARED)):
            engine = engine_of(replace(VALUES, **split))
            steps(engine, 1, 2)
            save(engine, channel, results / f"rate_{name}", 2)
            found = {}
            for factor in (1.0, 10.0):
                told = replace(VALUES, value_rate_factor=factor, **split)
                fresh = engine_of(told)
                load_checkpoint(fresh, results / f"rate_{name}")
                head = fresh.gpts[-1].value_head.weight
                norm = fresh.gpts[-1].decoder.final_layernorm.weight
                before, norm_before = head.detach().clone(), norm.detach().clone()
                steps(fresh, 3)
                found[f"head_{factor:g}"] = (head.detach() - before).numpy()
                found[f"norm_{factor:g}"] = (norm.detach() - norm_before).numpy()
                found[f"rates_{factor:g}"] = np.array([group["lr"] for group in fresh.optimizer.param_groups])
            report(f"value_rate_{name}", found)

    def interrupted(engine: Engine) -> None:
        """Saves of step 4 beside a whole checkpoint of step 2 and the damaged one of another lineage's step 4: each dies, or
        fails, at another operation."""
        run = RunFolder(results / "run")
        run.create()

        def count(step: int, parts: list) -> None:  # type: ignore[type-arg]
            state = {"events": 0, "groups": {}, "next_group": 0}
            write_manifest(
                run,
                Manifest(
                    step=step, attempt=1, lineage=0, forks={}, dispatcher=state, streams={}, evaluations_reached=0, parts=parts
                ),
            )

        def newest() -> int:
            manifest, _ = newest_manifest(run, parts=True)
            assert manifest is not None
            return manifest.step

        count(2, save(engine, channel, run.checkpoint(2), 2))
        count(4, save(engine, channel, run.checkpoint(4), 4))
        assert newest() == 4
        damaged = run.checkpoint(4) / "trainer" / "__0_0.distcp"
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        assert newest() == 2
        aside = results / "step_000004"
        shutil.copytree(run.checkpoint(4), aside)

        done: list[Operation] = []

        def attempt(plan: Callable[[Operation], str | None]) -> str:
            """Where a save with faults ends, and that the next one succeeds."""
            shutil.rmtree(run.checkpoint(4), ignore_errors=True)
            shutil.copytree(aside, run.checkpoint(4))
            with FaultLayer(run.path, plan):
                try:
                    save(engine, channel, run.checkpoint(4), 4)
                    end = "saved"
                except SaveError as error:
                    end = str(error)
                except Killed:
                    end = "killed"
            assert newest() == 2, end
            if end not in ("saved", "killed"):
                assert not (run.checkpoint(4) / ".tmp-trainer").exists()
            count(4, save(engine, channel, run.checkpoint(4), 4))
            assert newest() == 4
            return end

        def note(operation: Operation) -> None:
            if operation.kind in WRITES:
                done.append(operation)

        assert attempt(note) == "saved"
        points = [operation.point for operation in done]
        # The first time and the last that each is passed: most of them are writes of the same file.
        numbers = sorted({points.index(p) for p in points} | {len(points) - 1 - points[::-1].index(p) for p in points})
        ends = {"points": [points[number] for number in numbers], "killed": [], "failed": []}
        for number in numbers:
            left = [number]

            def at(operation: Operation, left=left) -> str | None:
                if operation.kind not in WRITES:
                    return None
                left[0] -= 1
                if left[0] < -1:
                    raise Killed
                return "ENOSPC" if left[0] == -1 else None

            def once(operation: Operation, left=left) -> str | None:
                left[0] -= operation.kind in WRITES
                return "ENOSPC" if left[0] == -1 and operation.kind in WRITES else None

            ends["killed"].append(attempt(at))
            left[0] = number
            ends["failed"].append(attempt(once))
        report("interrupted", {key: np.array(value) for key, value in ends.items()})

    if ranks == 1:
        for model, options in OPTIONS.items():
            save_in(model, "one", options)
            if any(layout.endswith("_shared") for layout in LAYOUTS[model]):
                save_in(model, "one_shared", replace(options, **SHARED))
        for model in ("dense", "proximal", "value_head", "half"):
            resume_in(model, "one", OPTIONS[model], 1, "one")
        for model in ("value_head", "half"):
            resume_in(model, "one_shared", replace(OPTIONS[model], **SHARED), 1, "one_shared")
        with_and_without_proximal()
        copies()
        skipped("one", PLAIN)
        other_options()
        other_value_rate()
        unreadable()
        unplanned()
        given_up()
        interrupted(engine_of(PLAIN))
    else:
        layouts()
        torch.distributed.barrier()
        stop_groups()
        if rank:
            return
        os.environ.update(rank_environment(0, 1, free_port("127.0.0.1")))
        start_groups(PLAIN, timeout_s=60.0)
        shrunk()
    torch.distributed.barrier()
    stop_groups()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
