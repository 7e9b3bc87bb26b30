"""Where the commands start: Ctrl-C ends them without a traceback already while their modules are imported."""

import importlib
import signal


def submit() -> int:
    return _run("submit")  # which takes Ctrl-C over, once it has begun


def report() -> int:
    return _run("report")


def plan() -> int:
    return _run("plan")


def _run(name: str) -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as with nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code: int = importlib.import_module(f"prl.cli.{name}").main()
    return code
