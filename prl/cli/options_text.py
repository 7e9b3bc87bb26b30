"""Every configuration key with its help and default, from the options' annotations."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from prl.config.bounds import bounds_of, describe
from prl.config.schema import Config


def describe_options() -> str:
    """One paragraph a section, two lines a key: name, default, help, choices or bounds."""
    return "\n".join(_lines(Config, ""))


def _lines(cls: type, prefix: str) -> Iterator[str]:
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind, text = _split_annotation(hints[field.name])
        inner = _options_class(kind)
        if inner is not None:
            many = "[]" if get_origin(kind) is tuple else ""
            yield f"\n{prefix}{field.name}{many}: {text}"
            yield from _lines(inner, f"{prefix}{field.name}{many}.")
        else:
            yield f"  {prefix}{field.name} = {_default(field)}\n      {text}{_choices(kind)}{_bounds(hints[field.name])}"


def _split_annotation(hint: Any) -> tuple[Any, str]:
    if get_origin(hint) is Annotated:
        kind, text = get_args(hint)[:2]
        return kind, str(text)
    return hint, ""


def _options_class(kind: Any) -> type | None:
    candidates = (kind, *get_args(kind))
    return next((c for c in candidates if isinstance(c, type) and dataclasses.is_dataclass(c)), None)


def _choices(kind: Any) -> str:
    literals = [str(a) for k in (kind, *get_args(kind)) for a in get_args(k) if isinstance(a, str)]
    literals = literals or [str(a) for a in get_args(kind) if isinstance(a, str)]
    return f" [{' | '.join(dict.fromkeys(literals))}]" if literals else ""


def _bounds(hint: Any) -> str:
    bounds = bounds_of(hint)
    return f" [{describe(bounds)}]" if bounds else ""


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return _yaml(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return _yaml(field.default_factory())
    return "(must be given)"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, tuple):
        return "[]" if not value else str(list(value))
    return str(value)
