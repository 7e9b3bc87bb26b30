"""The run's token: whoever has it belongs to the run."""

import hmac
import os
import secrets
from pathlib import Path

from prl.config.plain_files import read_plain


def create_token(path: Path) -> str:
    """A new random token in a file that only its owner can read."""
    token = secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
    return token


def read_token(path: Path) -> str:
    return read_plain(path).decode().strip()


def authorization(token: str) -> dict[str, str]:
    """The header that every request of the run carries."""
    return {"Authorization": f"Bearer {token}"}


def is_authorized(header: str | None, token: str) -> bool:
    """Whether a request's Authorization header carries the token; takes equally long whatever it carries."""
    sent = (header or "").encode(errors="surrogateescape")  # aiohttp decodes bytes that are no text this way
    return hmac.compare_digest(sent, f"Bearer {token}".encode())
