"""A process that must not outlive the one that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(pid: int | None = None, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send a signal to this process when its parent is gone, however that ended; at once where it is gone
    already, which a parent's `pid` tells also where it ended before this call. On systems other than Linux nothing happens,
    and the lost control plane ends the process."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if pid is None else pid
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
