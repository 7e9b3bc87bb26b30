"""What a command prints: never an error of its own because of an encoding, a closed stream or a cause's control characters."""

import io
import os
import sys


def prepare() -> None:
    """Streams that were closed take everything and keep nothing; characters that the terminal has not are replaced."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def silence_broken() -> None:
    """Where a stream cannot be written any more, let Python's flush at the exit go nowhere instead of complaining."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def tell(line: str) -> None:
    """A line on stderr; nowhere where that is closed or full, so that what must be done after it is done."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        silence_broken()


def printable(text: str) -> str:
    """Control characters but line ends escaped: what a failed process or a model said must not move the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
