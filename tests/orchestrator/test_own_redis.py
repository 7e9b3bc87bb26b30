"""The run's own Redis server in an attempt."""

import dataclasses

import pytest
import redis

from prl.config.schema import Config
from prl.control.token import create_token
from prl.orchestrator.agent import _own_redis
from prl.runfolder.paths import RunFolder
from prl.streams.opening import open_reader, open_writer
from prl.streams.options import RedisOptions, StreamsOptions


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    return run


def test_none_is_started_where_none_is_asked_for(run):
    other = StreamsOptions(backend="redis", redis=RedisOptions(url="redis://host:6379/0"))
    for streams in (StreamsOptions(), StreamsOptions(redis=RedisOptions(start=True)), other):
        with _own_redis(run, 1, "127.0.0.1", dataclasses.replace(Config(), streams=streams), "token"):
            assert not run.redis.exists()


@pytest.mark.redis
def test_it_serves_for_as_long_as_the_attempt_lasts(run):
    streams = StreamsOptions(backend="redis", redis=RedisOptions(start=True))
    token = create_token(run.token)
    with _own_redis(run, 1, "127.0.0.1", dataclasses.replace(Config(), streams=streams), token):
        open_writer(run, "actor-000", "run", 1, streams).close()
        reader = open_reader(run, "run", 1, streams)
        assert reader.entries() == []
    port = int(run.redis_url(1).read_text().split(":")[-1].split("/")[0])
    with redis.Redis("127.0.0.1", port, password=token) as client, pytest.raises(redis.ConnectionError):
        client.ping()
