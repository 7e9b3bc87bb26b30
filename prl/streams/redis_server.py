"""A Redis server of the run's own: its data in the run folder, the run's token as its password, gone with its parent."""

import asyncio
import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import redis

from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import StorageFull, publish_json
from prl.streams.redis_store import ONCE, pause

_STOP_S = 10.0
_LOOK_S = 0.5  # between two looks whether it lives
_CUT = "Short write while writing to the AOF file"  # what its log says of a full filesystem that took a part
log = logging.getLogger(__name__)
_BECOME = """
import os, signal, sys
from prl.control.parent import end_with_parent
end_with_parent()
for warning in (signal.SIGUSR1, signal.SIGUSR2):  # of the batch system, which may send them to all processes
    signal.signal(warning, signal.SIG_IGN)
os.execvp("redis-server", ["redis-server", sys.argv[1]])
"""


class RedisServerError(Exception):
    """The server cannot be started, or has ended; the message says why and what to do."""


class RedisServer:
    """A running server. To be started by a thread that lives as long as it should: it ends with that thread."""

    def __init__(self, run: RunFolder, attempt: int, host: str, port: int, token: str, *, start_s: float) -> None:
        """Returns once it answers, and has said where it is in the attempt's redis.json. Raises RedisServerError, and
        StorageFull where the filesystem of its folder has no room."""
        program = shutil.which("redis-server")
        if program is None:
            raise RedisServerError(
                "streams.redis.start: there is no redis-server on PATH. Install Redis (Debian: apt-get install redis-server), "
                "give streams.redis.url, or use streams.backend=folder"
            )
        self._folder = folder = run.redis
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = folder / "redis.conf"
        config.unlink(missing_ok=True)
        with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(_config(folder, host, port, token))
        self._log = folder / "redis.log"
        with self._log.open("ab") as output:
            self._log_from = output.tell()  # what comes before is of earlier attempts
            self._process = _start(config, output)
        try:
            self._wait(host, port, token, start_s)
        except BaseException:
            self.close()
            raise
        publish_json(run.redis_url(attempt), {"url": f"redis://{host}:{port}/0"})

    def _wait(self, host: str, port: int, token: str, start_s: float) -> None:
        end = time.monotonic() + start_s
        with redis.Redis(host, port, password=token, socket_timeout=start_s, retry=ONCE) as client:
            while True:
                if self._process.poll() is not None:
                    raise self._why_ended()
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError) as error:  # it is not there yet, or loads its data
                    if time.monotonic() >= end:
                        raise RedisServerError(
                            f"redis-server did not answer within {start_s:g} s ({error}); see {self._log}"
                        ) from error
                pause()

    async def watch(self) -> None:
        """Until the server has ended by itself, which nobody comes back from in this attempt: it ends as soon as it cannot make
        a write durable. Raises RedisServerError, and StorageFull where the filesystem of its folder was full."""
        while self._process.poll() is None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(_LOOK_S)
        raise self._why_ended()

    def _why_ended(self) -> Exception:
        with self._log.open("rb") as file:
            file.seek(self._log_from)
            said = file.read().decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else "it said nothing"
        words = f"redis-server ended with code {self._process.returncode}: {last} (its log: {self._log})"
        for code in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(code) in said:
                return StorageFull(self._folder, OSError(code, words))
        if _CUT in said:
            return StorageFull(self._folder, OSError(errno.ENOSPC, words))
        return RedisServerError(words)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it. What it has acknowledged is durable in any case."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                log.warning("redis-server (process %d) did not end in %g s: its storage hangs", self.process_id, _STOP_S)


def _start(config: Path, output: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", _BECOME, str(config)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _config(folder: Path, host: str, port: int, token: str) -> str:
    """Every write is on disk before it is acknowledged; nothing is ever evicted."""
    where = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    return f"""bind {host}
port {port}
protected-mode yes
requirepass {token}
dir "{where}"
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
daemonize no
"""
