"""Finds the final answer in the text of a solution."""

import re

_AFTER_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_BOXED = re.compile(r"\\boxed\s*\{")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} whose braces close; None where there is none."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        position = match.end()
        while position < len(text):
            character = text[position]
            if character == "\\":
                position += 2  # an escaped brace is text
                continue
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return text[match.end() : position].strip()
            position += 1
    return None


def after_hashes(text: str) -> str | None:
    """What stands behind the last #### on its line; None where there is none."""
    found = _AFTER_HASHES.findall(text)
    return found[-1].strip() if found else None


def final_answer(text: str) -> str | None:
    r"""The last \boxed{...}, or else what stands behind the last ####; None where there is neither, or nothing in it."""
    boxed = last_boxed(text)
    return (after_hashes(text) if boxed is None else boxed) or None
