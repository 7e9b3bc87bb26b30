"""The accelerators of a node: which of them this job was given, and their state, as nvidia-smi tells it."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prl.cluster.run import run

DEVICES_S = 30.0  # nvidia-smi takes seconds where no process holds the driver; on a broken device it may hang
_MIB = 1024**2
_FIELDS = (
    "index,uuid,name,memory.used,ecc.errors.uncorrected.volatile.total,retired_pages.pending,remapped_rows.pending,"
    "remapped_rows.failure"
)
_UNIT = re.compile(r"\s*\[.*\]$")  # of a header, such as [MiB]


@dataclass(frozen=True)
class Device:
    """One accelerator. What nvidia-smi does not know of it is None."""

    index: int
    name: str
    used_bytes: int | None  # of its memory
    uncorrected_errors: int | None  # of its memory, since the driver was loaded
    repair_pending: bool | None  # rows or pages of its memory are to be replaced at its next reset
    repair_failed: bool | None  # and could not be
    lost: str = ""  # what nvidia-smi says of one that does not answer


@dataclass(frozen=True)
class Devices:
    there: tuple[Device, ...]
    said: tuple[str, ...]  # lines of nvidia-smi's that speak of no device: errors

    @staticmethod
    def of(facts: Mapping[str, Any]) -> "Devices":
        return Devices(tuple(Device(**one) for one in facts["there"]), tuple(map(str, facts["said"])))


def given_devices() -> list[str] | None:
    """The accelerators that Slurm has given to the job on this node (or a user to a run without Slurm), by numbers or ids;
    None where nobody says, so that all of them are. Where Slurm lets a job see no others they are counted from 0 anyway."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named in (None, "NoDevFiles") else [device for device in named.split(",") if device]


def ask_devices() -> Devices | None:
    """Of those that are given; of all where ids name these. None where there is no nvidia-smi. Raises ProgramError."""
    if shutil.which("nvidia-smi") is None:
        return None
    output = run(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv"], timeout_s=DEVICES_S, check=False)
    found, given = parse_devices(f"{output.out}\n{output.err}"), given_devices()
    if given is not None and all(map(str.isdecimal, given)):
        found = replace(found, there=tuple(device for device in found.there if str(device.index) in given))
    if output.code != 0 and not found.said:
        return Devices(found.there, (f"nvidia-smi ended with code {output.code}",))
    return found


def parse_devices(text: str) -> Devices:
    """What `nvidia-smi --query-gpu=... --format=csv` prints, whichever fields were asked for."""
    header: list[str] = []
    there: list[Device] = []
    said: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if not header and "index" in cells:
            header = [_UNIT.sub("", cell) for cell in cells]
        elif header and len(cells) == len(header):
            device = _device(dict(zip(header, cells, strict=True)))
            if device is None:
                said.append(line)
            else:
                there.append(device)
        elif not line.startswith("#"):
            said.append(line)
    return Devices(tuple(there), tuple(said))


def _device(cells: Mapping[str, str]) -> Device | None:
    index = _number(cells["index"])
    if index is None:
        return None
    lost = next((cell for name in ("uuid", "name") if _is_lost(cell := cells.get(name, ""))), "")
    pending = [_flag(cells.get(name, "")) for name in ("retired_pages.pending", "remapped_rows.pending")]
    used_mib = _number(cells.get("memory.used", ""))
    errors = next((cells[name] for name in cells if name.startswith("ecc.errors.uncorrected.volatile.total")), "")
    return Device(
        index,
        cells.get("name", ""),
        None if used_mib is None else used_mib * _MIB,
        _number(errors),
        True if True in pending else (None if pending == [None, None] else False),
        _flag(cells.get("remapped_rows.failure", "")),
        lost,
    )


def _is_lost(cell: str) -> bool:
    """Whether a device does not even say who it is, e.g. [GPU is lost] or [Unknown Error]."""
    return cell.startswith("[") and cell not in ("[N/A]", "[Not Supported]")


def _number(cell: str) -> int | None:
    match = re.match(r"([0-9]{1,15})(?:\.[0-9]+)?(?: MiB)?$", cell, re.ASCII)
    return int(match.group(1)) if match else None


def _flag(cell: str) -> bool | None:
    return {"Yes": True, "No": False}.get(cell)
