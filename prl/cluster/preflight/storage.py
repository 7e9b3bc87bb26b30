"""The room that the run folder has: asked once, on rank 0, since all nodes share its filesystem."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prl.cluster.mounts import mount_of, mounted
from prl.cluster.preflight.lustre import Quota, Targets, parse_project, parse_quota, parse_targets
from prl.cluster.preflight.measure import LIMIT_S, Room, in_thread, room_in
from prl.cluster.run import ProgramError, run

LFS_S = 15.0  # of one question


@dataclass(frozen=True)
class Storage:
    """What is None could not be asked, or is no matter of this filesystem; `failed` says why where that should not be so."""

    room: Room | None
    quotas: tuple[Quota, ...]
    targets: Targets | None
    failed: tuple[str, ...]


async def measure_storage(folder: Path) -> Storage:
    """Of the filesystem in which the folder lies, with quota and storage targets where that is Lustre."""
    failed: list[str] = []
    room, asked = None, None
    try:
        room = await in_thread(lambda: room_in(folder), LIMIT_S)
        asked = await in_thread(lambda: ask_lustre(folder, mounted), 4 * LFS_S + LIMIT_S)
    except (OSError, ProgramError) as error:
        failed.append(f"{folder}: {error}")
    quotas, targets = asked or ((), None)
    return Storage(room, quotas, targets, tuple(failed))


def ask_lustre(folder: Path, mounts: Callable[[], list[tuple[str, str]]]) -> tuple[tuple[Quota, ...], Targets] | None:
    """Quotas of this user, the group and the folder's project, and the targets; None where there is no `lfs` or the folder is
    elsewhere. `mounts` as `mounted`. Raises ProgramError."""
    if shutil.which("lfs") is None:
        return None
    mount, kind = mount_of(folder, mounts())
    if kind != "lustre":
        return None
    quota = run(["lfs", "quota", mount], timeout_s=LFS_S).out
    project = parse_project(run(["lfs", "project", "-d", str(folder.resolve())], timeout_s=LFS_S, check=False).out)
    if project is not None:
        quota += run(["lfs", "quota", "-p", str(project), mount], timeout_s=LFS_S).out
    targets = run(["lfs", "df", mount], timeout_s=LFS_S, check=False)  # fails where a target does not answer
    return parse_quota(quota), parse_targets(targets.out)
