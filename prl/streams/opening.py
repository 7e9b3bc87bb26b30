"""Writers and readers of the rollout stream, on the backend that the config names."""

import hashlib
import json
from collections.abc import Callable

from prl.config.plain_files import read_plain
from prl.control.token import read_token
from prl.runfolder.paths import RunFolder
from prl.streams.contract import Appender, Source
from prl.streams.folder import FolderAppender, FolderSource
from prl.streams.options import RedisOptions, StreamsOptions
from prl.streams.reader import RolloutReader
from prl.streams.writer import RolloutWriter


def open_writer(
    run: RunFolder,
    writer: str,
    run_name: str,
    attempt: int,
    options: StreamsOptions,
    *,
    awaited: Callable[[], bool] = lambda: False,
) -> RolloutWriter:
    """The stream of one writer (an actor); a name of its own for each of those that write at one time. `awaited`: whether a
    step waits for what it writes, which a bounded store then takes in any case."""
    store: Appender
    if options.backend == "redis":
        from prl.streams.redis_store import RedisAppender, RedisPlace

        store = RedisAppender(RedisPlace(*_place(run, attempt, options.redis)), writer, options.redis, awaited)
    else:
        store = FolderAppender(run, writer)
    return RolloutWriter(store, writer, run_name, attempt, options)


def open_reader(
    run: RunFolder, run_name: str, attempt: int, options: StreamsOptions, vocabulary: int | None = None
) -> RolloutReader:
    """The streams of all writers of a run; see `RolloutReader`."""
    store: Source
    if options.backend == "redis":
        from prl.streams.redis_store import RedisPlace, RedisSource

        store = RedisSource(RedisPlace(*_place(run, attempt, options.redis)), options.redis)
    else:
        store = FolderSource(run)
    return RolloutReader(store, run_name, vocabulary)


def _place(run: RunFolder, attempt: int, options: RedisOptions) -> tuple[str, str | None, str]:
    """The server's URL and password, and the prefix of the run's keys, which tells runs on one server apart."""
    token = read_token(run.token)
    prefix = f"prl:{hashlib.sha256(token.encode()).hexdigest()[:16]}"
    if options.start:
        return str(json.loads(read_plain(run.redis_url(attempt)))["url"]), token, prefix
    if not options.url:
        raise ValueError("streams.backend=redis needs streams.redis.start=true or streams.redis.url")
    password = read_plain(options.password_file).decode().strip() if options.password_file else None
    return options.url, password, prefix
