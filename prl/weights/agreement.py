"""What processes must have in common before their first collective: the trainer's ranks among themselves, and the trainer and
a sampler's worker. Free of torch.

Where they differ, collectives hang or carry wrong bytes without an error, so each compares before it joins a group. Of the
environment NCCL_* and GLOO_* are compared; TORCH_NCCL_* steer a process's own watchdog and need not be equal.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from prl.weights.plan import TensorSpec, to_json

PREFIXES = ("NCCL_", "GLOO_")
NOT_SET = "not set"

_OF_A_NODE = "it names what lies on a node, which may be called otherwise on another one"
_OF_THE_LOG = "it changes what is logged alone"
# What may differ, and why.
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"), _OF_A_NODE),
    **dict.fromkeys(("NCCL_HOSTID", "NCCL_TOPO_FILE", "NCCL_TOPO_DUMP_FILE"), _OF_A_NODE),
    **dict.fromkeys((f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{end}" for end in ("PKEY", "CERT", "CA_FILE", "CA_PATH")), _OF_A_NODE),
    **dict.fromkeys(("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"), _OF_THE_LOG),
    "NCCL_GRAPH_REGISTER": "it is about buffers of a process's own CUDA graphs, and vLLM sets it",
    "NCCL_NO_CACHE": "it is about how a process reads its own environment",
}

_INSTALL = "install the same version on all nodes of both components"
_START = "start both from the same run folder"
_ADVICE: Mapping[str, str] = {
    "torch": _INSTALL,
    "NCCL": _INSTALL,
    "library": "give both components accelerators, or neither",
    "dtype": _START,
    "tensors": "see that all nodes read the same model folder and the same code",
    "plan": "see that all nodes read the same model folder, the same configuration and the same code",
    "bucket_bytes": _START,
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of one side; `settings` by their names, as text."""

    who: str
    host: str
    settings: Mapping[str, str]

    def in_words(self) -> str:
        return f"{self.who} on {self.host}: {', '.join(f'{name} {value}' for name, value in self.settings.items())}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "Facts":
        """Raises ValueError for anything else than `to_json` gave."""
        match value:
            case {"who": str(who), "host": str(host), "settings": {**given}}:
                settings = {name: text for name, text in given.items() if isinstance(name, str) and isinstance(text, str)}
                if settings == given:
                    return cls(who=who, host=host, settings=settings)
        raise ValueError(f"facts: expected {{who, host, settings: name to text}}, not {value!r}")


@dataclass(frozen=True)
class Difference:
    name: str
    ours: str
    theirs: str

    @property
    def harmless(self) -> str:
        """Why it does no harm; nothing where it does."""
        return HARMLESS.get(self.name, "")


def of_process(who: str, host: str, libraries: Mapping[str, str], environment: Mapping[str, str]) -> Facts:
    """`libraries`: torch and the library that carries tensors, with their versions."""
    return Facts(who=who, host=host, settings={**libraries, **_named(environment)})


def facts(
    who: str,
    host: str,
    *,
    libraries: Mapping[str, str],
    dtype: str,
    tensors: Sequence[TensorSpec],
    bucket_bytes: int,
    environment: Mapping[str, str],
    plan: str = "",
) -> Facts:
    """Of an end of the weights' way. `libraries`: as in `of_process`; `dtype` as torch calls it, without "torch."; `tensors`:
    what a version consists of, in the order of the wire; `plan`: the digest of who sends what to whom, where versions go by
    lanes."""
    of_prl = {"dtype": dtype, "tensors": tensors_digest(tensors), "bucket_bytes": str(bucket_bytes)}
    of_lanes = {"plan": plan} if plan else {}
    return Facts(who=who, host=host, settings={**libraries, **of_prl, **of_lanes, **_named(environment)})


def tensors_digest(tensors: Sequence[TensorSpec]) -> str:
    """Names, dtypes, shapes and order of tensors in a few words that can be compared."""
    digest = blake2b(json.dumps(to_json(tensors)).encode(), digest_size=8).hexdigest()
    return f"{len(tensors)} of {sum(spec.bytes for spec in tensors)} bytes, list {digest}"


def differences(ours: Facts, theirs: Facts) -> list[Difference]:
    """By name, harmless ones too. Of torch the release counts: what it was built for shows in the library."""
    found = []
    for name in sorted({*ours.settings, *theirs.settings}):
        mine, other = (side.settings.get(name, NOT_SET) for side in (ours, theirs))
        same = _release(mine) == _release(other) if name == "torch" else mine == other
        if not same:
            found.append(Difference(name, mine, other))
    return found


def in_words(ours: Facts, theirs: Facts, found: Sequence[Difference]) -> str:
    """One line that names each difference, on which side it is what, and what to do (or why nothing has to be done)."""
    sides = f"{ours.who} on {ours.host}", f"{theirs.who} on {theirs.host}"
    return "; ".join(
        f"{one.name} is {one.ours} at {sides[0]} and {one.theirs} at {sides[1]}: "
        f"{one.harmless or _ADVICE.get(one.name, 'set it alike on all nodes, in cluster.setup')}"
        for one in found
    )


def check_agreement(ours: Facts, theirs: Facts) -> str:
    """What differs without harm, in words. Raises ValueError, in words, where anything else does."""
    found = differences(ours, theirs)
    harmful = [one for one in found if not one.harmless]
    if harmful:
        raise ValueError(f"these differ: {in_words(ours, theirs, harmful)}")
    return in_words(ours, theirs, found)


def _named(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(environment.items()) if name.startswith(PREFIXES)}


def _release(version: str) -> str:
    return version.partition("+")[0]
