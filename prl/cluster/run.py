"""The one way in which prl runs external programs: an argument list, a time-out, no shell."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class ProgramError(Exception):
    """An external program is missing, failed or took too long; the message says which, how and what it printed."""


@dataclass(frozen=True)
class Output:
    code: int
    out: str
    err: str


Runner = Callable[..., Output]
ENDING = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


@contextmanager
def beyond_signals() -> Iterator[None]:
    """Programs that are run here do not get SIGTERM, which Slurm sends, more than once, to all processes of a job that it ends,
    nor the signals with which it warns of that: what it is asked and told then must not end with them. Nor does this thread,
    until afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # a program inherits the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(
    arguments: Sequence[str],
    *,
    timeout_s: float = 30.0,
    check: bool = True,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> Output:
    """Run a program, with `stdin` to read, and give what it printed. `environment`: all its variables; None: those of this
    process, but language and times so that what it prints can be read. Raises ProgramError where it is missing or runs longer
    than `timeout_s` and, with `check`, where it exits with a code other than 0."""
    name = arguments[0]
    if environment is None:
        environment = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(
            list(arguments), capture_output=True, timeout=timeout_s, check=False, input=stdin.encode(), env=environment
        )
    except FileNotFoundError:
        raise ProgramError(f"{name}: no such program on PATH") from None
    except subprocess.TimeoutExpired:
        raise ProgramError(f"{name}: no answer within {timeout_s:g} s ({' '.join(arguments)})") from None
    output = Output(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
    if check and output.code != 0:
        said = (output.err.strip() or output.out.strip() or "it printed nothing")[-2000:]
        raise ProgramError(f"{name}: exit code {output.code} ({' '.join(arguments)}): {said}")
    return output
