#!/usr/bin/env python
"""Writes prl/config/engine_args.txt: the arguments that the installed vLLM's server takes, so that a login node, where vLLM is
not installed, can check sample.engine_args. To be run after vLLM is changed. A line is an argument's long name, its kind (see
prl/config/engine_args.py) with a question mark where it may be None, and its bounds or choices.

    python tools/engine_args.py
"""

import argparse
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm.config
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

TARGET = Path(__file__).parents[1] / "prl" / "config" / "engine_args.txt"
KINDS = {"int": "int", "float": "float", "human_readable_int": "size", "loads": "json"}
BOUNDS = {"Ge": (">=", "ge"), "Gt": (">", "gt"), "Le": ("<=", "le"), "Lt": ("<", "lt")}


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    bounds = dict(bounds_of_fields())
    lines = {
        option[2:]: describe(action, bounds.get(action.dest, []))
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    TARGET.write_text("".join(f"{name} {lines[name]}\n" for name in sorted(lines)))
    print(f"{len(lines)} arguments in {TARGET}")


def bounds_of_fields() -> Iterator[tuple[str, list[str]]]:
    """Of vLLM's settings whose bounds are the same wherever their name occurs."""
    found: dict[str, list[list[str]]] = {}
    for section in vars(vllm.config).values():
        if isinstance(section, type) and dataclasses.is_dataclass(section):
            for name, field in getattr(section, "__pydantic_fields__", {}).items():
                marks = [(*BOUNDS[type(mark).__name__], mark) for mark in field.metadata if type(mark).__name__ in BOUNDS]
                found.setdefault(name, []).append([f"{sign}{getattr(mark, key):g}" for sign, key, mark in marks])
    for name, several in found.items():
        if all(bounds == several[0] for bounds in several):
            yield name, several[0]


def describe(action: argparse.Action, bounds: list[str]) -> str:
    if action.nargs == 0:
        return "flag" if isinstance(action, argparse.BooleanOptionalAction) else "switch"
    if action.nargs == "?":
        return "any"
    kind, optional = kind_of(action.type)
    if action.choices:
        folded = getattr(action.type, "__name__", "") == "<lambda>"  # lower case, with _ for -
        choices = [str(choice) for choice in action.choices if choice not in (None, "None")]
        return " ".join([("folded" if folded else "choice") + "?" * optional, *choices])
    return " ".join([kind + "?" * optional, *(bounds if kind in ("int", "float", "size") else [])])


def kind_of(convert: Any) -> tuple[str, bool]:
    """The kind, and whether the text None stands for nothing: what vLLM wraps a conversion in, it keeps as `return_type`."""
    inner = inspect.getclosurevars(convert).nonlocals.get("return_type") if inspect.isfunction(convert) else None
    if inner is not None:
        return kind_of(inner)[0], convert.__name__ == "_optional_type"
    return KINDS.get(getattr(convert, "__name__", ""), "text"), False


if __name__ == "__main__":
    main()
