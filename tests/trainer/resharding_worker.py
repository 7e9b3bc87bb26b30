"""One rank of four of the tests of checkpoints that are split along several axes: `resharding_worker.py FOLDER`. Rank 0 writes
what came out to FOLDER/ranks_4/<name>.npz for the tests to judge, and then goes on from the checkpoints alone."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_layouts import OPTIONS, PLAIN, RESHARDED, SHARED, reshardings
from ranks import rank_environment

from prl.control.ports import free_port


def main(folder: Path) -> None:
    from prl.trainer import device

    device.install(1)
    import torch
    from live_bytes import LiveBytes
    from resumes import engine_of, relayout, resumed, went_on
    from trained import steps

    from prl.trainer.checkpoint import begin_save, finish_save
    from prl.trainer.parallel import Channel, start_groups, stop_groups

    rank = int(os.environ["RANK"])
    results = folder / "ranks_4"
    start_groups(PLAIN, timeout_s=120.0)
    channel = Channel(120.0)

    def report(name: str, values: dict[str, np.ndarray]) -> None:
        if rank == 0:
            np.savez(results / f"{name}.npz", **values)

    def resume_in(model: str, layout: str, split: dict[str, object], origin: str) -> None:
        options = replace(OPTIONS[model], **split)  # type: ignore[arg-type]
        report(f"resumed_{model}_{layout}_from_{origin}", resumed(model, options, results / model / origin))

    def memory_of_a_save() -> None:
        """The most that each of four ranks, which share an optimizer, has more in a save's beginning."""
        options = replace(OPTIONS["half"], **SHARED)  # type: ignore[arg-type]
        relayout(options, channel)
        engine = engine_of(options, "half")
        steps(engine, 1)
        with LiveBytes() as live:
            under_way = begin_save(engine, channel, results / "half" / "watched", 1)
        peaks = channel.gather(live.peak)
        finish_save(under_way, channel, 120.0)
        report("memory_of_a_save", {"peaks": np.array(peaks)})

    memory_of_a_save()
    for model, splits in RESHARDED.items():
        for layout, split in splits.items():
            options = replace(OPTIONS[model], **split)
            relayout(options, channel)
            report(f"went_on_{model}_{layout}", went_on(model, options, channel, results / model / layout))
            resume_in(model, layout, split, layout)
        for layout, origin in reshardings(model):
            relayout(replace(OPTIONS[model], **splits[layout]), channel)
            resume_in(model, layout, splits[layout], origin)
    torch.distributed.barrier()
    stop_groups()
    if rank:
        return
    os.environ.update(rank_environment(0, 1, free_port("127.0.0.1")))
    start_groups(PLAIN, timeout_s=60.0)
    for model, splits in RESHARDED.items():
        for layout in splits:
            resume_in(model, "one", SHARED if layout.endswith("_shared") else {}, layout)
    stop_groups()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
