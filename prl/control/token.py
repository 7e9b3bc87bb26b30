"""The run's token: whoever has it belongs to the run."""

import hmac
import os
import re
import secrets
from pathlib import Path

from prl.config.plain_files import read_plain

_BYTES = 32
_FORM = re.compile(r"[\w-]{43}", re.ASCII)  # of so many bytes in base64


class TokenError(Exception):
    """A file holds no token of a run; the message names it and says what to do."""


def create_token(path: Path) -> str:
    """A new random token in a file that only its owner can read."""
    token = secrets.token_urlsafe(_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
    return token


def read_token(path: Path) -> str:
    """Raises OSError, and TokenError for anything but a whole token: with an empty one nobody would be kept out."""
    token = read_plain(path).decode(errors="replace").strip()
    if not _FORM.fullmatch(token):
        raise TokenError(f"{path}: is damaged and holds no token; remove it, and prl-submit --resume makes another one")
    return token


def authorization(token: str) -> dict[str, str]:
    """The header that every request of the run carries."""
    return {"Authorization": f"Bearer {token}"}


def is_authorized(header: str | None, token: str) -> bool:
    """Whether a request's Authorization header carries the token; takes equally long whatever it carries."""
    sent = (header or "").encode(errors="surrogateescape")  # aiohttp decodes bytes that are no text this way
    return hmac.compare_digest(sent, f"Bearer {token}".encode())
