"""What an attempt's preflight.json says for people; prl/orchestrator/preflight.py writes it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.config.plain_files import read_plain


class PreflightError(Exception):
    """A preflight.json is not what an attempt writes; the message names it and says what is wrong."""


@dataclass(frozen=True)
class PreflightFacts:
    took_s: float
    nodes: int
    clock: tuple[str, float] | None  # the node whose clock is furthest from the orchestrator's, and how far, in seconds
    slowest: tuple[str, str, float] | None  # the two nodes between which TCP was slowest, MiB/s
    median_mib_per_s: float | None  # of all pairs
    findings: Sequence[str]


def read_preflight(path: Path) -> PreflightFacts:
    """Raises PreflightError, also where there is no such file."""
    try:
        facts = json.loads(read_plain(path))
        return PreflightFacts(
            _number(facts["took_s"]),
            len(facts["nodes"]),
            _clock(facts["nodes"]),
            *_links(facts["links"]),
            tuple(str(finding["words"]) for finding in facts["findings"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PreflightError(f"{path}: does not say what the nodes were like ({type(error).__name__}: {error})") from error


def _clock(nodes: Mapping[str, Any]) -> tuple[str, float] | None:
    clocks = [(str(name), abs(_number(of["clock"]["offset_s"]))) for name, of in nodes.items() if of["clock"] is not None]
    return max(clocks, key=lambda clock: clock[1], default=None)


def _links(links: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str, float] | None, float | None]:
    speeds = sorted(
        (min(_number(link["to_peer_mib_per_s"]), _number(link["from_peer_mib_per_s"])), str(link["node"]), str(link["peer"]))
        for link in links
        if not link["error"]
    )
    if not speeds:
        return None, None
    speed, node, peer = speeds[0]
    return (node, peer, speed), speeds[len(speeds) // 2][0]


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is no number")
    return number
