"""A Redis server of the run's own: its data in the run folder, the run's token as its password, gone with its parent."""

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
from prl.runfolder.publish import publish_json
from prl.streams.redis_store import ONCE, pause

_STOP_S = 10.0
log = logging.getLogger(__name__)
_BECOME = """
import os, sys
from prl.control.parent import end_with_parent
end_with_parent()
os.execvp("redis-server", ["redis-server", sys.argv[1]])
"""


class RedisStartError(Exception):
    """The server cannot be started; the message says why and what to do."""


class RedisServer:
    """A running server. To be started by a thread that lives as long as it should: it ends with that thread."""

    def __init__(self, run: RunFolder, attempt: int, host: str, port: int, token: str, *, start_s: float) -> None:
        """Returns once it answers, and has said where it is in the attempt's redis.json. Raises RedisStartError."""
        program = shutil.which("redis-server")
        if program is None:
            raise RedisStartError(
                "streams.redis.start: there is no redis-server on PATH. Install Redis (Debian: apt-get install redis-server), "
                "give streams.redis.url, or use streams.backend=folder"
            )
        folder = run.redis
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = folder / "redis.conf"
        config.unlink(missing_ok=True)
        with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(_config(folder, host, port, token))
        self._log = folder / "redis.log"
        with self._log.open("ab") as output:
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
                code = self._process.poll()
                if code is not None:
                    raise RedisStartError(f"redis-server ended with code {code}: {self._last_words()} ({self._log})")
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError) as error:  # it is not there yet, or loads its data
                    if time.monotonic() >= end:
                        raise RedisStartError(
                            f"redis-server did not answer within {start_s:g} s ({error}); see {self._log}"
                        ) from error
                pause()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

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
