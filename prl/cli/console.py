"""What a command prints: never an error of its own because of an encoding, a closed stream or a cause's control characters."""

import errno
import io
import os
import sys

_TO_DO = {
    errno.ENOENT: "it is gone, or nothing can be made there; name another",
    errno.EACCES: "have its owner permit it (chmod), or name another",
    errno.EPERM: "have its owner permit it, or name another",
    errno.EROFS: "name one on another filesystem",
    errno.ENOTDIR: "a part of the path is no folder; name another",
    errno.ENAMETOOLONG: "give it a shorter name",
}


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


def refuse(program: str, *problems: str) -> None:
    """A line on stderr for each problem."""
    for problem in problems:
        tell(f"{program}: error: {printable(problem, keep='')}")


def in_words(error: OSError) -> str:
    """What is wrong, where, and what to do."""
    if error.strerror is None or error.filename is None:
        return str(error)
    to_do = _TO_DO.get(error.errno or 0)
    return f"{os.fsdecode(error.filename)}: {error.strerror}{f'; {to_do}' if to_do else ''}"


def printable(text: str, keep: str = "\n") -> str:
    """Control characters but line ends escaped: what a failed process or a model said must not move the reader's terminal."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)
