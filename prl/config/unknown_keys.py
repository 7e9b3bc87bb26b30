"""What to say of a key that there is not: which one was meant, by its spelling or by what others call it."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

from prl.config.bounds import names_of


def suggestion(options: type, key: Any, value: Any, where: str) -> str:
    """To be put behind "unknown key"; `where` stands before the keys of this class, e.g. "cluster.". Of a whole section also
    which keys its own ones are."""
    near = _nearest(options, key)
    if near is None:
        return f"known keys here: {', '.join(get_type_hints(options))}"
    inner = list(_inner(options, near, value))
    of_each = f" {', '.join(f'{where}{key}.{own} is {where}{near}.{meant}' for own, meant in inner)}" if inner else ""
    return f"did you mean {where}{near}?{of_each}"


def _inner(options: type, near: str, value: Any) -> Iterator[tuple[str, str]]:
    """(as it was written, as it is called) of the keys of a section that was meant to be `near`, as far as they can be told."""
    section = _unannotated(get_type_hints(options, include_extras=True)[near])
    if dataclasses.is_dataclass(section) and isinstance(section, type) and isinstance(value, Mapping):
        for key in value:
            meant = _nearest(section, key)
            if meant is not None:
                yield str(key), meant


def _nearest(options: type, key: Any) -> str | None:
    hints = get_type_hints(options, include_extras=True)
    called = {name: option for option, hint in hints.items() for name in names_of(option, hint)}
    near = difflib.get_close_matches(str(key), called, n=1)
    return called[near[0]] if near else None


def _unannotated(hint: Any) -> Any:
    return get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
