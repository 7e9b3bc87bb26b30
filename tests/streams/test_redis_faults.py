"""A Redis server that is full, cannot save, forgets, or dies: who uses it is told what, where and what to do."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
import redis
from stream_data import make_group

from prl.control.ports import free_port
from prl.control.token import create_token
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import StorageFull, in_words, says_full
from prl.streams.files import StreamError
from prl.streams.opening import open_reader, open_writer
from prl.streams.options import RedisOptions, StreamsOptions
from prl.streams.redis_server import RedisServer, RedisServerError
from prl.streams.redis_store import ONCE, RedisEvicts, RedisForgot, RedisFull, RedisUnsaved

pytestmark = [pytest.mark.redis, pytest.mark.deadline(60)]
RNG = np.random.default_rng(0)
STREAMS = StreamsOptions(backend="redis", redis=RedisOptions(start=True, full_s=0.3, reconnect_s=0.3), roll_groups=1)


@contextmanager
def client_of(run):
    url = json.loads(run.redis_url(1).read_text())["url"]
    with redis.Redis.from_url(url, password=run.token.read_text(), retry=ONCE) as client:
        yield client


@contextmanager
def full(client):
    client.config_set("maxmemory", "1")
    try:
        yield
    finally:
        client.config_set("maxmemory", "0")


def test_a_server_without_room_is_told_to_who_starts(redis_run):
    told = r"RedisFull: Redis at redis://127\.0\.0\.1:\d+/0 has no room left: all of its maxmemory is used\. Set that higher"
    with client_of(redis_run) as client, full(client):
        for begin in (
            lambda: open_writer(redis_run, "a", "run", 1, STREAMS),
            lambda: open_reader(redis_run, "run", 1, STREAMS),
        ):
            with pytest.raises(RedisFull) as error:
                begin()
            words = in_words(error.value, redis_run.path)
            assert re.match(told, words)
            assert "OutOfMemoryError" not in words  # which is taken for a process's own
    writer = open_writer(redis_run, "a", "run", 1, STREAMS)
    with client_of(redis_run) as client, full(client):
        with pytest.raises(TimeoutError, match=r"no room for rollouts for 0.3 s: 0 entries .* maxmemory is used"):
            writer.append(make_group(0, RNG))
        with pytest.raises(RedisFull, match="maxmemory"):  # an actor that starts again
            open_writer(redis_run, "b", "run", 1, STREAMS)


@pytest.mark.parametrize(
    ("limit", "policy", "evicts"),
    [
        ("100mb", "allkeys-lru", True),
        ("100mb", "allkeys-random", True),
        ("100mb", "volatile-ttl", False),
        ("0", "allkeys-lru", False),
    ],
)
def test_a_server_that_would_evict_rollouts_is_refused(redis_run, limit, policy, evicts):
    with client_of(redis_run) as client:
        client.config_set("maxmemory", limit)
        client.config_set("maxmemory-policy", policy)
        try:
            if not evicts:
                assert open_reader(redis_run, "run", 1, STREAMS).entries() == []
                return
            for begin in (
                lambda: open_writer(redis_run, "a", "run", 1, STREAMS),
                lambda: open_reader(redis_run, "run", 1, STREAMS),
            ):
                with pytest.raises(RedisEvicts, match=rf"redis://127\.0\.0\.1:\d+/0 throws away .*{policy}.* noeviction"):
                    begin()
        finally:
            client.config_set("maxmemory", "0")
            client.config_set("maxmemory-policy", "noeviction")


def test_a_server_without_room_keeps_no_unreadable_entry_and_goes_on(redis_run, caplog):
    writer, reader = open_writer(redis_run, "a", "other", 1, STREAMS), open_reader(redis_run, "run", 1, STREAMS)
    (entry,) = writer.append(make_group(0, RNG))
    with client_of(redis_run) as client, full(client), pytest.raises(StreamError, match="other"):
        reader.read(entry)
    assert reader.unreadable == 1
    assert reader.entries() == []
    assert "the unreadable a/0 is deleted, and not kept for a person to look at: Redis at" in caplog.text


def test_a_server_that_forgets_ends_who_reads_and_who_writes(redis_run):
    writer, reader = open_writer(redis_run, "a", "run", 1, STREAMS), open_reader(redis_run, "run", 1, STREAMS)
    entries = [entry for number in range(2) for entry in writer.append(make_group(number, RNG))]
    with client_of(redis_run) as client:
        client.flushall()
    told = r"Redis at redis://127.* has lost the run's rollouts .*FLUSHALL.*appendonly yes.* prl-submit --resume RUN"
    with pytest.raises(RedisForgot, match=told):
        reader.read(entries[1])
    with pytest.raises(RedisForgot, match=told):
        writer.append(make_group(2, RNG))
    # One that starts again knows of nothing, and would use numbers anew.
    (again,) = open_writer(redis_run, "a", "run", 1, STREAMS).append(make_group(3, RNG))
    assert again.sequence == 0
    with pytest.raises(RedisForgot, match=told):
        reader.read(again)
    assert reader.unreadable == 0
    assert len(open_reader(redis_run, "run", 1, STREAMS).read(again)) == 1


def status_is(client, status: str) -> None:
    client.bgsave()
    end = time.monotonic() + 20
    while (
        client.info("persistence")["rdb_bgsave_in_progress"] or client.info("persistence")["rdb_last_bgsave_status"] != status
    ):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_server_that_cannot_save_is_told(redis_run):
    writer = open_writer(redis_run, "a", "run", 1, STREAMS)
    taken = redis_run.redis / "dump.rdb"  # the name under which it saves
    taken.mkdir()
    with client_of(redis_run) as client:
        client.config_set("save", "86400 1000000")
        try:
            status_is(client, "err")
            with pytest.raises(RedisUnsaved, match=r"^Redis at redis://127.* cannot save its data: .*CONFIG GET dir.* MISCONF"):
                writer.append(make_group(0, RNG))
        finally:
            taken.rmdir()
            status_is(client, "ok")
            client.config_set("save", "")
    assert [entry.sequence for entry in writer.flush()] == [0]


@pytest.fixture
def small_run(tmp_path):
    """A run whose Redis folder lies on a filesystem of 4 MiB."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    create_token(run.token)
    run.redis.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", run.redis]
    if subprocess.run(mount, check=False, capture_output=True, timeout=30).returncode:
        pytest.skip("needs the right to mount a filesystem")
    yield run
    subprocess.run(["umount", run.redis], check=True, timeout=30)


def own_server(run):
    return closing(RedisServer(run, 1, "127.0.0.1", free_port("127.0.0.1"), run.token.read_text(), start_s=30))


def fill(client) -> None:
    for number in range(100):
        client.set(f"filler{number}", bytes(2**19))


def test_the_own_server_ends_on_a_full_filesystem_and_that_is_told(small_run):
    with own_server(small_run) as server, client_of(small_run) as client:
        with pytest.raises(redis.ConnectionError):
            fill(client)
        with pytest.raises(StorageFull, match="no space is left") as error:
            asyncio.run(asyncio.wait_for(server.watch(), 20))
    assert error.value.filename == str(small_run.redis)
    assert "redis-server ended with code 1" in str(error.value)
    assert says_full(in_words(error.value))


def test_another_server_that_lives_on_there_is_told_as_full(small_run):
    """One that does not wait for its storage with every write."""
    with own_server(small_run), client_of(small_run) as client:
        writer = open_writer(small_run, "a", "run", 1, STREAMS)
        client.config_set("appendfsync", "everysec")
        with pytest.raises(redis.ResponseError):
            fill(client)
        with pytest.raises(RedisUnsaved, match=r"MISCONF .*No space left on device") as error:
            writer.append(make_group(0, RNG))
    words = in_words(error.value, small_run.path)
    assert words.startswith("Redis at redis://127.0.0.1:")
    assert "/0: no space is left. What was made durable before is safe. Free some space" in words


def test_the_death_of_the_own_server_is_told_with_its_log(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    create_token(run.token)
    with own_server(run) as server:
        for warning in (signal.SIGUSR1, signal.SIGUSR2):  # which the batch system may send to all processes
            os.kill(server.process_id, warning)
        with client_of(run) as client:
            assert client.ping()
        os.kill(server.process_id, signal.SIGKILL)
        with pytest.raises(RedisServerError, match=r"redis-server ended with code -9: .*run/streams/redis/redis\.log"):
            asyncio.run(asyncio.wait_for(server.watch(), 20))
