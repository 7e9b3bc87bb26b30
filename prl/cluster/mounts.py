"""On which filesystem a folder lies, and of what kind that is."""

from pathlib import Path

import psutil

DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"})  # of the node itself
# Besides: in the node's memory, and of a container's image, which may be there, too.
LOCAL = DISKS | {"tmpfs", "ramfs", "overlay", "squashfs"}


def mount_of(folder: Path, mounts: list[tuple[str, str]]) -> tuple[str, str]:
    """Where the filesystem of a folder is mounted, and its kind; of several mounts at one place the last one counts."""
    resolved = folder.resolve()
    around = [(place, kind) for place, kind in mounts if resolved.is_relative_to(place)]
    longest = max((len(place) for place, _ in around), default=0)
    return next(((place, kind) for place, kind in reversed(around) if len(place) == longest), ("", ""))


def mounted() -> list[tuple[str, str]]:
    """Where filesystems are mounted here, and their kinds, in the order of their mounts."""
    return [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
