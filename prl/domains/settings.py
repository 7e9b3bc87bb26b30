"""Options of a domain, read into its own frozen dataclass."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from prl.domains.api import DomainError

T = TypeVar("T")


def read_options(cls: type[T], options: Mapping[str, Any], domain: str) -> T:
    """An instance of the dataclass `cls`, whose fields all have defaults. A default's type is the type expected; an int may
    stand for a float, and one text for a tuple of texts. Raises DomainError naming the nearest known option."""
    defaults = cls()
    known = [field.name for field in dataclasses.fields(defaults)]  # type: ignore[arg-type]
    values = {}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has: {', '.join(known) or 'none'}"
            raise DomainError(f"domain {domain} has no option {name}; {hint}")
        values[name] = _converted(value, getattr(defaults, name), f"domain {domain}, option {name}")
    return cls(**values)


def _converted(value: Any, default: Any, where: str) -> Any:
    if isinstance(default, tuple):
        items = (value,) if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise DomainError(f"{where}: expected a text or a list of texts, found {value!r}")
    if isinstance(default, Mapping):
        if not isinstance(value, Mapping):
            raise DomainError(f"{where}: expected keys and values, found {value!r}")
        unknown = [key for key in value if key not in default]
        if unknown:
            raise DomainError(f"{where}: unknown key {unknown[0]}; known: {', '.join(default)}")
        return {**default, **{key: _converted(item, default[key], f"{where}.{key}") for key, item in value.items()}}
    kind = type(default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise DomainError(f"{where}: expected {kind.__name__}, found {value!r}")
    return value
