"""A real Redis server for the tests."""

import json

import pytest
import redis

from prl.control.ports import free_port
from prl.control.token import create_token
from prl.runfolder.paths import RunFolder
from prl.streams.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """A server with a run folder of its own; for tests marked `redis`."""
    run = RunFolder(tmp_path_factory.mktemp("redis") / "run")
    run.create()
    run.attempt(1).mkdir()
    server = RedisServer(run, 1, "127.0.0.1", free_port("127.0.0.1"), create_token(run.token), start_s=30)
    run.attempt(2).mkdir()
    run.redis_url(2).write_text(run.redis_url(1).read_text())  # a second attempt, as if the server lived on
    yield server, run
    server.close()


@pytest.fixture
def redis_run(redis_server):
    """Its run folder; nothing is in the server."""
    _, run = redis_server
    url = json.loads(run.redis_url(1).read_text())["url"]
    with redis.Redis.from_url(url, password=run.token.read_text()) as client:
        client.flushall()
    return run
