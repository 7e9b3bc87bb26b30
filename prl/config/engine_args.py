"""Checks of sample.engine_args, of which vLLM would say only in the job, after a long start, that they are none.

engine_args.txt, which tools/engine_args.py writes, has a line for each argument of vLLM's server: its long name, its kind and
its bounds or choices. Kinds: `flag` (true or false), `switch` (true alone), `int`, `float`, `size` (a whole number, or one with
k, M, ...), `choice`, `folded` (a choice in which - and _, capitals and small letters are the same), `json`, `any` (a
value, or true for none) and `text`; with a question mark also the word None.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prl.config.bounds import Above, AtLeast, AtMost, Below, Bound, describe
from prl.config.load import shown

LIST = Path(__file__).with_name("engine_args.txt")
_NAMED = {
    "device-memory-utilization": "sample.gpu_memory_utilization",
    "dtype": "sample.dtype",
    "enable-return-routed-experts": "sample.record_routing",
    "enforce-eager": "sample.enforce_eager",
    "gpu-memory-utilization": "sample.gpu_memory_utilization",
    "kv-cache-memory-bytes": "sample.kv_cache_mib",
    "max-model-len": "sample.max_model_len",
    "max-num-seqs": "sample.max_num_seqs",
    "model": "model.path",
    "quantization": "sample.quantization",
    "tensor-parallel-size": "sample.tensor_parallel",
}
# With other values the weights would not arrive, log-probs would not be the policy's, requests would not reach the server, or
# nothing would be counted.
_OWN = (
    *("host", "port", "uds", "root-path", "api-key", "middleware", "grpc", "grpc-port", "served-model-name", "headless"),
    *("load-format", "generation-config", "override-generation-config", "logprobs-mode", "enable-scale-out", "config"),
    *("worker-cls", "worker-extension-cls", "weight-transfer-config", "pipeline-parallel-size", "api-server-count"),
    *("nnodes", "node-rank", "master-addr", "master-port", "quantization-config"),
    *("enable-expert-parallel", "enable-eplb", "eplb-config", "disable-log-stats"),
)
_OWN_PREFIXES = ("data-parallel-", "ssl-")
_BOUNDS: dict[str, Callable[[float], Bound]] = {">=": AtLeast, ">": Above, "<=": AtMost, "<": Below}
_POWERS: dict[str, int] = {letter: 1000**power for power, letter in enumerate("kmgt", 1)} | {
    letter: 1024**power for power, letter in enumerate("KMGT", 1)
}

Value = str | int | float | bool


@dataclass(frozen=True)
class Argument:
    kind: str
    optional: bool
    rest: tuple[str, ...]  # bounds or choices

    @property
    def bounds(self) -> tuple[Bound, ...]:
        found = (re.fullmatch(r"([<>]=?)(.+)", bound) for bound in self.rest)
        return tuple(_BOUNDS[match[1]](float(match[2])) for match in found if match)


def arguments() -> dict[str, Argument]:
    """Name to what vLLM's server takes under it."""
    found = {}
    for line in LIST.read_text().splitlines():
        name, kind, *rest = line.split()
        found[name] = Argument(kind.rstrip("?"), kind.endswith("?"), tuple(rest))
    return found


def engine_args_problems(given: Mapping[str, Value]) -> Iterator[str]:
    """What prl sets itself, names that vLLM's server has not, and values that it would refuse."""
    known = arguments()
    for key, value in given.items():
        name, dot, _ = key.partition(".")
        name = name.replace("_", "-")
        plain = name.removeprefix("no-")
        if plain in _NAMED:
            yield f"sample.engine_args.{key}: has a key of its own, {_NAMED[plain]}"
        elif plain in _OWN or plain.startswith(_OWN_PREFIXES):
            yield f"sample.engine_args.{key}: is set by prl and cannot be changed"
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "its arguments are those of `vllm serve --help`"
            yield f"sample.engine_args.{key}: vLLM's server has no such argument; {hint}"
        elif not dot:  # else it is one key of several, in JSON
            wanted = _wanted(known[name], value, negated=name.startswith("no-"))
            if wanted:
                yield f"sample.engine_args.{key} = {shown(value)}: {wanted}"


def _wanted(argument: Argument, value: Value, *, negated: bool) -> str:
    """What the argument takes instead of the value; empty where it takes that. prl gives vLLM true as `--name`, false as
    `--no-name`, and all else as `--name value`."""
    if argument.kind in ("flag", "switch"):
        if argument.kind == "switch" or negated:
            return "" if value is True else "is given or not; set it to true, or leave it out"
        return "" if isinstance(value, bool) else "must be true or false"
    if argument.kind == "any" and value is True:
        return ""
    if isinstance(value, bool):
        return f"must be {_described(argument)}"
    text = str(value)
    if argument.optional and text in ("", "None"):
        return ""
    if not _fits(argument, text):
        return f"must be {_described(argument)}"
    if text.startswith("-") and not re.fullmatch(r"-\d+|-\d*\.\d+", text):  # as argparse tells numbers from options
        return "begins with -, so that vLLM's server would take it for an argument; give another"
    return ""


def _fits(argument: Argument, text: str) -> bool:
    match argument.kind:
        case "choice":
            return text in argument.rest
        case "folded":
            return text.lower().replace("-", "_") in argument.rest
        case "int" | "float" | "size":
            number = _number(argument.kind, text)
            return number is not None and all(bound.holds(number) for bound in argument.bounds)
        case "json":
            return _is_json(text)
        case _:
            return True


def _number(kind: str, text: str) -> float | None:
    suffixed = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip()) if kind == "size" else None
    try:
        if suffixed is None:
            return float(text) if kind == "float" else int(text)
        number, letter = suffixed.groups()
        return float(number if letter.islower() else int(number)) * _POWERS[letter]
    except ValueError:
        return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _described(argument: Argument) -> str:
    none = ", or None" if argument.optional else ""
    if argument.kind in ("choice", "folded"):
        return f"one of {', '.join(argument.rest)}{none}"
    kinds = {"int": "a whole number", "float": "a number", "size": "a whole number, perhaps with k or M", "json": "JSON"}
    bounds = f" {describe(argument.bounds)}" if argument.bounds else ""
    return f"{kinds.get(argument.kind, 'a value')}{bounds}{none}"
