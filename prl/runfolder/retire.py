"""Deletion of checkpoints that nobody wants to keep."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import sync_folder


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept: the `last` ones (None: all), and those of steps that `every` divides (0: none)."""

    last: int | None
    every: int


def retired(steps: Sequence[int], newest: int, keep: Keep) -> list[int]:
    """Which of the checkpoints of these steps, `newest` among them, are not kept. Steps after `newest` belong to a lineage that
    was left: they neither go nor count, and are replaced when their step comes again."""
    if keep.last is None:
        return []
    upto = sorted(step for step in steps if step <= newest)
    return [step for step in upto[: -keep.last] if not keep.every or step % keep.every]


def retire(run: RunFolder, newest: int, keep: Keep) -> int:
    """Delete the checkpoints that are not kept now that the one of `newest` is durable; how many. First of each goes what makes
    it count, so that none is ever found in part. What a save that failed or was interrupted has left before `newest` goes as
    well. Raises OSError."""
    if keep.last is None:
        return 0
    found = [step for step, _ in run.manifests()]
    leaving = retired(found, newest, keep)
    for step in leaving:
        run.manifest(step).unlink()
        sync_folder(run.checkpoint(step))
    for step, folder in run.checkpoint_folders():
        if step < newest and not run.manifest(step).exists():
            shutil.rmtree(folder)
    return len(leaving)
