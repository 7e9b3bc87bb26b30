"""The run's own Redis server in an attempt."""

import asyncio
import dataclasses
import os
import signal

import pytest
import redis

from prl.config.schema import Config
from prl.control.token import create_token
from prl.domains.options import DomainOptions
from prl.flow.ending import NO_MEANS
from prl.orchestrator.agent import _own_redis
from prl.orchestrator.binding import Plan
from prl.orchestrator.children import ChildPlan
from prl.orchestrator.main import Orchestrator
from prl.orchestrator.options import RunOptions
from prl.orchestrator.resume import find_start
from prl.runfolder.outcome import read_outcome
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


@pytest.mark.redis
@pytest.mark.deadline(60)
def test_its_death_ends_the_attempt_and_it_ends_before_the_outcome_is_written(run):
    streams = StreamsOptions(backend="redis", redis=RedisOptions(start=True))
    config = Config(run=RunOptions(folder=str(run)), domains=(DomainOptions(name="digits"),), streams=streams)
    token = create_token(run.token)
    alive, causes = [], []

    async def attempt(number: int, kill: bool = False, terminate: bool = False) -> None:
        run.attempt(number).mkdir(exist_ok=True)
        with _own_redis(run, number, "127.0.0.1", config, token) as server:

            def means():
                alive.append(server._process.poll() is None)
                return NO_MEANS

            plan = Plan(number, (), (ChildPlan("actor", 0, 0, (), {}),), 1)
            orchestrator = Orchestrator(run, config, plan, find_start(run, config), token, means, server)
            await orchestrator.serve("127.0.0.1")
            if kill:
                os.kill(server.process_id, signal.SIGKILL)
            elif terminate:  # as Slurm does, with all processes of the job
                os.kill(server.process_id, signal.SIGTERM)
                orchestrator.shutdown.expect_deaths()
                asyncio.get_running_loop().call_later(2.5, orchestrator.shutdown.leave, "Slurm preempts the job", "preempted")
            else:
                orchestrator.shutdown.cancel("cancelled by the test")
            await orchestrator.lead()
            causes.append([cause.words for cause in orchestrator._causes.found])

    asyncio.run(attempt(1, kill=True))
    killed = read_outcome(run.exit(1))
    assert killed.outcome == "failed"
    assert killed.cause.startswith("orchestrator, the run's Redis server: RedisServerError: redis-server ended with code -9")
    asyncio.run(attempt(2))
    asyncio.run(attempt(3, terminate=True))
    assert causes == [[killed.cause], ["cancelled by the test"], ["Slurm preempts the job"]]
    assert alive == [False, False, False]
