"""What `lfs quota` and `lfs df` print, as what it means: of all releases and forms, and of anything else nothing."""

import re
from dataclasses import dataclass

_UNITS = {"": 1, "k": 1, "m": 1024, "g": 1024**2, "t": 1024**3, "p": 1024**4, "e": 1024**5}  # in KiB
_SIZE = re.compile(r"\[?([0-9]{1,19})(?:\.([0-9]{1,6}))?([kmgtpe]?)\]?(\*?)\]?", re.ASCII | re.IGNORECASE)
_OWNER = re.compile(r"Disk quotas for (.+?)\s*(?:\(.*\))?:$")
_TARGET = re.compile(r"(\S+)\s+(\S+)\s+(\S+)\s+(\S+)\s+([0-9]{1,3})%\s.*\[OST:([0-9]+)\]", re.ASCII)
_PROJECT = re.compile(r"\s*([0-9]{1,10})\s+[P-]\s+/.*", re.ASCII)
_DOWN = re.compile(r"(\S*OST[0-9a-fA-F]{4}\S*)\s*:\s*(\S.*)", re.ASCII)


@dataclass(frozen=True)
class Limits:
    """Of a quota: blocks in bytes, or a number of files. A limit of 0 is none."""

    used: int
    soft: int
    hard: int
    over: bool  # lfs has put a star behind what is used
    grace: str  # "-", what is left of the time for which more than the soft limit may be used, or "none": it is over

    @property
    def left(self) -> int | None:
        """What may still be written: nothing beyond the soft limit once the grace is over; None: as much as there is."""
        if self.over and self.grace == "none":
            return 0
        return max(self.hard - self.used, 0) if self.hard else None


@dataclass(frozen=True)
class Quota:
    owner: str  # e.g. "usr ann", "grp physics" or "prj 110255"
    filesystem: str
    blocks: Limits
    files: Limits


@dataclass(frozen=True)
class Target:
    """An object storage target, on which files, or parts of them, lie."""

    name: str
    available_bytes: int
    used_percent: int


@dataclass(frozen=True)
class Targets:
    there: tuple[Target, ...]
    down: tuple[str, ...]  # those that do not answer, with what lfs says of them

    @property
    def fullest(self) -> Target | None:
        return max(self.there, key=lambda target: (target.used_percent, -target.available_bytes), default=None)


def parse_quota(text: str) -> tuple[Quota, ...]:
    """The rows of `lfs quota` that speak of a whole filesystem. A path that is long stands on a line of its own."""
    found: list[Quota] = []
    owner, path = "", ""
    for line in text.splitlines():
        words = line.replace(",", " ").split()
        title = _OWNER.match(line.strip())
        if title:
            owner, path = title.group(1), ""
        elif len(words) == 1:
            path = words[0]
        elif len(words) == 8 and path:
            found += _quota(owner, path, words)
            path = ""
        else:
            path = ""
            if len(words) == 8 and words[0].startswith("/"):
                words.append("")  # the grace of the files is wrapped into the next line
            if len(words) == 9 and words[0] != "Filesystem":
                found += _quota(owner, words[0], words[1:])
    return tuple(found)


def _quota(owner: str, path: str, words: list[str]) -> list[Quota]:
    blocks, files = _limits(words[:4], 1024), _limits(words[4:], 1)
    return [Quota(owner, path, blocks, files)] if blocks is not None and files is not None else []


def _limits(words: list[str], unit: int) -> Limits | None:
    sizes = [_SIZE.fullmatch(word) for word in words[:3]]
    if any(size is None for size in sizes):
        return None
    used, soft, hard = (_scaled(size, unit) for size in sizes if size is not None)
    return Limits(used, soft, hard, words[0].rstrip("]").endswith("*"), words[3])


def _scaled(size: re.Match[str], unit: int) -> int:
    whole, part, letter, _ = size.groups()
    scale = _UNITS[letter.lower()] * unit
    return int(whole) * scale + (int(part) * scale // 10 ** len(part) if part else 0)


def parse_project(text: str) -> int | None:
    """The project of a folder, as `lfs project -d` lists it with its id and whether it hands that on: `110255 P /folder`; None
    where it has none, which is project 0."""
    found = _PROJECT.fullmatch(text.strip("\n"))
    return int(found[1]) or None if found else None


def parse_targets(text: str) -> Targets:
    """The object storage targets among the rows of `lfs df`."""
    there: list[Target] = []
    down: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        target, silent = _TARGET.match(line.strip()), _DOWN.match(line.strip())
        if target:
            available = _SIZE.fullmatch(target.group(4))
            if available:
                there.append(Target(target.group(1), _scaled(available, 1024), int(target.group(5))))
        elif silent:
            down.append(f"{silent.group(1)}: {silent.group(2)}")
    return Targets(tuple(there), tuple(down))
