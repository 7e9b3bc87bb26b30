"""What every child process of a node agent starts from, and how its failure reaches the orchestrator."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from prl.config.load import load
from prl.config.schema import Config
from prl.control.client import ControlClient, ControlError
from prl.control.garbage import leave_what_is_loaded
from prl.control.parent import end_with_parent
from prl.control.threaded import ThreadedClient
from prl.control.token import read_token
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import in_words

Client = TypeVar("Client", ControlClient, ThreadedClient)


class EndsRun(Exception):
    """An error that another start of the process would only meet again: the run ends with it."""


@dataclass(frozen=True)
class Child:
    """A child's place in the run, from the environment its node agent gave it."""

    config: Config
    run: RunFolder
    attempt: int
    role: str
    index: int
    host: str  # address of this node that others reach it by
    port: int | None  # port to serve on, for roles that serve
    token: str
    control_url: str
    start: int = 0  # how often it was started before in this attempt
    staged: Path | None = None  # the model on this node's own disk, where it is there

    @property
    def model(self) -> Path:
        """Config, tokenizer and weights of the run's model, to read from."""
        return self.staged or self.run.model


def child_from_environment() -> Child:
    try:
        run = RunFolder(os.environ["PRL_RUN"])
        port = os.environ.get("PRL_PORT")
        return Child(
            config=load(run.config),
            run=run,
            attempt=int(os.environ["PRL_ATTEMPT"]),
            role=os.environ["PRL_ROLE"],
            index=int(os.environ["PRL_INDEX"]),
            host=os.environ["PRL_HOST"],
            port=None if port is None else int(port),
            token=read_token(run.token),
            control_url=os.environ["PRL_CONTROL_URL"],
            start=int(os.environ.get("PRL_START", "0")),
            staged=Path(os.environ["PRL_MODEL"]) if "PRL_MODEL" in os.environ else None,
        )
    except KeyError as error:
        raise SystemExit(f"{error.args[0]} is not set: this program is started by prl's node agent (see prl-submit)") from None


def run_child(main: Callable[[Child, ControlClient], Awaitable[None]]) -> NoReturn:
    """Run an asynchronous role to its end. Its exception goes to the orchestrator as the cause and ends the process with 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the orchestrator's: it ends the children in order
    dump_stacks_when_asked()
    end_with_parent()
    child = child_from_environment()
    leave_what_is_loaded()

    async def guarded() -> int:
        client = _client_of(child, ControlClient)
        async with client:
            try:
                await main(child, client)
                if client.lost is not None:
                    raise client.lost
                return 0
            except Exception as error:
                await report_failure(client, error, child.run.path)
                say(traceback.format_exc())
                return 1

    sys.exit(asyncio.run(guarded()))


def run_threaded_child(main: Callable[[Child, ThreadedClient], None]) -> NoReturn:
    """The same for a synchronous role, whose work is saved at a step's end: the batch system's SIGTERM, which may reach all
    processes of a job, leaves it the time for that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dump_stacks_when_asked()
    end_with_parent(number=signal.SIGKILL)
    child = child_from_environment()
    leave_what_is_loaded()
    code = 0
    with _client_of(child, ThreadedClient) as client:
        try:
            main(child, client)
            if client.lost is not None:
                raise client.lost
        except BaseException as error:  # torch has some that are no Exception
            code = 1
            try:
                client.call("fail", _failure(error, child.run.path), deadline_s=5.0, reason="reporting a failure")
            except ControlError as unreachable:
                say(f"could not report the failure: {unreachable}")
            say(traceback.format_exc())
    sys.exit(code)


def _client_of(child: Child, kind: type[Client]) -> Client:
    options, on_lost = child.config.control, end_surely(child.config.control.stop_s)
    return kind(child.control_url, child.token, child.role, child.index, options, start=child.start, on_lost=on_lost)


def dump_stacks_when_asked() -> None:
    """At SIGUSR2 this process writes the stacks of all its threads to its log, whatever it is at. Before this call it ignores
    the signal, as its node agent has set it up; programs that it starts later would die of it, and are not sent it."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def end_surely(grace_s: float) -> Callable[[ControlError], None]:
    """What a process does whose orchestrator is lost: it says so, and where it has not ended by itself after `grace_s` seconds
    (it waits for another one in a collective call, say), it is killed with all that it started. Nobody else would: its node
    agent may be what is stuck."""

    def kill() -> None:
        say(f"prl: this process has not ended within {grace_s:g} s by itself and kills itself")
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def lost(error: ControlError) -> None:
        say(f"prl: this process ends: {error}")
        timer = threading.Timer(grace_s, kill)
        timer.daemon = True
        timer.start()

    return lost


def say(words: str) -> None:
    """To this process's log; where that takes nothing (its filesystem is full), what has to be done goes on without."""
    with contextlib.suppress(OSError):
        print(words, file=sys.stderr, flush=True)


def _failure(error: BaseException, folder: Path) -> dict[str, Any]:
    words = {"error": in_words(error, folder), "traceback": traceback.format_exc()}
    return {**words, "ends_run": isinstance(error, EndsRun)}


async def report_failure(client: ControlClient, error: Exception, folder: Path) -> None:
    """Tell the orchestrator what ends this process, which writes to `folder`; where it cannot be reached, say so here."""
    try:
        await client.call("fail", _failure(error, folder), deadline_s=5.0, reason="reporting a failure")
    except ControlError as unreachable:
        say(f"could not report the failure: {unreachable}")
