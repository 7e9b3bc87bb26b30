"""What only the Redis backend has: a server that may be lost, full, or somebody else's."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import redis
from stream_data import assert_equal, make_group

from prl.control.ports import free_port
from prl.control.token import create_token
from prl.runfolder.paths import RunFolder
from prl.streams.files import StreamError
from prl.streams.opening import open_reader, open_writer
from prl.streams.options import RedisOptions, StreamsOptions
from prl.streams.redis_server import RedisServer, RedisServerError
from prl.streams.redis_store import ONCE, RedisAppender, RedisLost, RedisPlace, RedisSource
from prl.streams.writer import RolloutWriter

pytestmark = pytest.mark.redis
RNG = np.random.default_rng(0)


def options(**fields) -> StreamsOptions:
    return StreamsOptions(backend="redis", redis=RedisOptions(start=True, **fields), roll_groups=1)


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    create_token(run.token)
    return run


@contextmanager
def serving(run, port=None):
    port = port or free_port("127.0.0.1")
    server = RedisServer(run, 1, "127.0.0.1", port, run.token.read_text(), start_s=30)
    try:
        yield server, port
    finally:
        server.close()


def test_what_was_acknowledged_outlives_a_killed_server(run):
    """The reader and the writer, too, go on with the one that comes after it."""
    with serving(run) as (server, port):
        writer, reader = open_writer(run, "a", "run", 1, options()), open_reader(run, "run", 1, options())
        groups = [make_group(n, RNG) for n in range(3)]
        entries = [entry for group in groups[:2] for entry in writer.append(group)]
        os.kill(server.process_id, signal.SIGKILL)
    appended = []
    writing = threading.Thread(target=lambda: appended.extend(writer.append(groups[2])))
    writing.start()
    time.sleep(0.3)
    assert not appended
    with serving(run, port):
        writing.join()
        entries += appended
        assert_equal([reader.read(entry)[0] for entry in entries], groups)
        assert reader.entries() == entries


def test_a_server_that_outlives_its_death_is_told_and_not_waited_for(run, monkeypatch, caplog):
    """As a process does that hangs in its storage."""
    with serving(run) as (server, _):
        wait = server._process.wait

        def too_long(timeout):
            raise subprocess.TimeoutExpired("redis-server", timeout)

        with monkeypatch.context() as patch:
            patch.setattr(server._process, "wait", too_long)
            server.close()
        wait(10)
    assert "did not end in 10 s: its storage hangs" in caplog.text


def test_a_server_that_stays_away_is_told(run):
    with serving(run) as (_, port):
        writer = open_writer(run, "a", "run", 1, options(reconnect_s=0.3))
    with pytest.raises(RedisLost, match=rf"Redis at redis://127.0.0.1:{port}/0 did not answer for 0.3 s"):
        writer.append(make_group(0, RNG))
    with serving(run, port):  # what could not be put is still there
        assert [entry.sequence for entry in writer.flush()] == [0]


def test_an_entry_whose_answer_was_lost_is_there_once(redis_run, monkeypatch):
    writer = open_writer(redis_run, "a", "run", 1, options())
    xadd = redis.Redis.xadd
    lost = []

    def adds_and_loses(client, *arguments, **named):
        answer = xadd(client, *arguments, **named)
        if not lost:
            lost.append(answer)
            raise redis.ConnectionError("the answer was lost")
        return answer

    monkeypatch.setattr(redis.Redis, "xadd", adds_and_loses)
    entries = writer.append(make_group(0, RNG)) + writer.append(make_group(1, RNG))
    assert lost == [b"1-0"]
    assert open_reader(redis_run, "run", 1, options()).entries() == entries


def test_an_entry_of_somebody_else_is_not_taken_for_ones_own(redis_run):
    """Two writers of one name: a fault of who started them, and told."""
    first, second = (open_writer(redis_run, "a", "run", 1, options()) for _ in range(2))
    first.append(make_group(0, RNG))
    with pytest.raises(redis.ResponseError, match="smaller than"):
        second.append(make_group(1, RNG))


def test_a_writer_waits_until_there_is_room(redis_run):
    group = make_group(0, RNG)
    turn = group.rollouts[0].turns[0]
    tokens = np.zeros(150_000, np.int32)  # 0.6 MB
    group = replace(group, rollouts=(replace(group.rollouts[0], turns=(turn._replace(prompt_ids=tokens),)),))
    writer = open_writer(redis_run, "a", "run", 1, options(max_mib=1, full_s=0.3))
    reader = open_reader(redis_run, "run", 1, options())
    (entry,) = writer.append(group)
    with pytest.raises(TimeoutError, match=r"no room for rollouts for 0.3 s: 1 entries of 1 MiB wait"):
        writer.append(group)
    reader.release({"a": entry.sequence})
    assert [entry.sequence for entry in writer.flush()] == [1]
    waited = threading.Timer(0.2, lambda: reader.release({"a": 1}))
    waited.start()
    assert [entry.sequence for entry in writer.append(group)] == [2]
    waited.join()
    writer.close()
    # One that starts again counts what is left there, but for the last, of which perhaps nobody knows.
    writer = open_writer(redis_run, "a", "run", 1, options(max_mib=1, full_s=0.3))
    assert [entry.sequence for entry in writer.append(group)] == [3]
    with pytest.raises(TimeoutError, match="no room"):
        writer.append(group)


def test_a_full_server_makes_writers_wait(redis_run, redis_server):
    writer = open_writer(redis_run, "a", "run", 1, options(full_s=0.3))
    url = json.loads(redis_run.redis_url(1).read_text())["url"]
    with redis.Redis.from_url(url, password=redis_run.token.read_text()) as client:
        client.config_set("maxmemory", "1")
        try:
            with pytest.raises(TimeoutError, match="maxmemory"):
                writer.append(make_group(0, RNG))
        finally:
            client.config_set("maxmemory", "0")
    assert [entry.sequence for entry in writer.flush()] == [0]


def test_an_entry_that_the_server_does_not_take_is_told_with_the_option(redis_run):
    group = make_group(0, RNG)
    turn = group.rollouts[0].turns[0]._replace(prompt_ids=np.zeros(2**19, np.int32))  # 2 MiB
    group = replace(group, rollouts=(replace(group.rollouts[0], turns=(turn,)),))
    url = json.loads(redis_run.redis_url(1).read_text())["url"]
    with redis.Redis.from_url(url, password=redis_run.token.read_text()) as client:
        client.config_set("proto-max-bulk-len", "1mb")
        try:
            writer = open_writer(redis_run, "a", "run", 1, options())
            with pytest.raises(StreamError, match=r"2 MiB of rollouts .* takes 1 MiB .* lower streams.roll_mib"):
                writer.append(group)
        finally:
            client.config_set("proto-max-bulk-len", "512mb")
    writer = open_writer(redis_run, "a", "run", 1, options())
    assert [entry.sequence for entry in writer.append(group)] == [0]


def test_nobody_gets_in_without_the_password(run):
    with serving(run) as (_, port):
        for password in (None, "wrong"):
            with (
                redis.Redis("127.0.0.1", port, password=password, retry=ONCE) as client,
                pytest.raises(redis.AuthenticationError),
            ):
                client.ping()
        writer = open_writer(run, "a", "run", 1, options())
        writer.append(make_group(0, RNG))
        create_token(run.token)
        where = f"Redis at redis://127.0.0.1:{port}/0 lets nobody in with this password"
        with pytest.raises(redis.AuthenticationError, match=f"^{where}.*have streams.redis.password_file name a file"):
            open_writer(run, "a", "run", 1, options())
        arguments = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert writer is not None
        assert run.token.read_text() not in arguments
    assert (run.redis / "redis.conf").stat().st_mode & 0o777 == 0o600
    assert run.redis.stat().st_mode & 0o777 == 0o700
    assert "appendonlydir" in {path.name for path in run.redis.iterdir()}


def test_an_existing_server_by_url_and_password_file(run, redis_run, tmp_path):
    """Two runs in one server know nothing of each other."""
    password = tmp_path / "password"
    password.write_text(redis_run.token.read_text() + "\n")
    url = json.loads(redis_run.redis_url(1).read_text())["url"]
    there = StreamsOptions(backend="redis", redis=RedisOptions(url=url, password_file=str(password)), roll_groups=1)
    own = open_writer(run, "a", "run", 1, there).append(make_group(0, RNG))
    assert open_reader(run, "run", 1, there).entries() == own
    assert open_reader(redis_run, "run", 1, options()).entries() == []


def test_a_server_has_to_be_named(run):
    with pytest.raises(ValueError, match=r"needs streams\.redis\.start=true or streams\.redis\.url"):
        open_writer(run, "a", "run", 1, StreamsOptions(backend="redis"))


def test_a_walk_takes_more_entries_than_are_asked_for_at_once(redis_run):
    writer = open_writer(redis_run, "a", "run", 1, options())
    entries = [entry for n in range(11) for entry in writer.append(make_group(n, RNG))]
    reader = open_reader(redis_run, "run", 1, options())
    assert reader.entries() == entries
    reader.release({"a": 1})
    assert reader.entries() == entries[2:]


def bytes_sent(client: redis.Redis) -> int:
    return client.info("stats")["total_net_output_bytes"]


def test_looking_for_entries_leaves_what_is_in_them_where_it_is(redis_run):
    group = make_group(0, RNG)
    turn = group.rollouts[0].turns[0]._replace(prompt_ids=np.zeros(2**20, np.int32))
    group = replace(group, rollouts=(replace(group.rollouts[0], turns=(turn,)),))
    writer = open_writer(redis_run, "a", "run", 1, options())
    entries = [entry for _ in range(5) for entry in writer.append(group)]
    assert sum(entry.bytes for entry in entries) > 20 * 2**20
    url = json.loads(redis_run.redis_url(1).read_text())["url"]
    with redis.Redis.from_url(url, password=redis_run.token.read_text()) as client:
        before = bytes_sent(client)
        assert open_reader(redis_run, "run", 1, options()).entries() == entries
        assert open_writer(redis_run, "a", "run", 2, options()).flush() == []
        assert bytes_sent(client) - before < 20_000


def test_a_server_that_cannot_start_says_why(run, monkeypatch):
    with serving(run) as (_, port), pytest.raises(RedisServerError, match=r"ended with code 1: .*(bind|listen)"):
        RedisServer(run, 1, "127.0.0.1", port, "token", start_s=30)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RedisServerError, match=r"no redis-server on PATH.*streams\.backend=folder"):
        RedisServer(run, 1, "127.0.0.1", 1, "token", start_s=30)


PARENT = """
import sys, time
from prl.runfolder.paths import RunFolder
from prl.streams.redis_server import RedisServer
server = RedisServer(RunFolder(sys.argv[1]), 1, "127.0.0.1", int(sys.argv[2]), "token", start_s=30)
print(server.process_id, flush=True)
time.sleep(60)
"""


def test_the_server_ends_with_its_parent(run):
    port = str(free_port("127.0.0.1"))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(run), port], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{server}") and "Z" not in _state(server):
        assert time.monotonic() < end
        time.sleep(0.05)


def _state(process: int) -> str:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def test_parts_of_it_work_alone(redis_run):
    url = json.loads(redis_run.redis_url(1).read_text())["url"]
    place = RedisPlace(url, redis_run.token.read_text(), "prl:other")
    assert "password" not in repr(place)
    writer = RolloutWriter(RedisAppender(place, "a", RedisOptions()), "a", "run", 1, StreamsOptions(roll_groups=1))
    (entry,) = writer.append(make_group(0, RNG))
    source = RedisSource(place, RedisOptions())
    source.set_aside(entry)
    assert list(source.entries()) == []
    with redis.Redis.from_url(url, password=redis_run.token.read_text()) as client:
        ((_, kept),) = client.xrange("prl:other:quarantine")
    assert kept[b"name"] == b"a/0"
    assert len(kept[b"data"]) == entry.bytes


def test_what_somebody_else_put_there_is_unreadable_and_no_crash(redis_run):
    url = json.loads(redis_run.redis_url(1).read_text())["url"]
    writer = open_writer(redis_run, "a", "run", 1, options())
    (good,) = writer.append(make_group(0, RNG))
    with redis.Redis.from_url(url, password=redis_run.token.read_text()) as client:
        (key,) = (name for name in client.keys("prl:*:rollouts:a"))
        writers = key.replace(b":rollouts:a", b":writers")
        client.sadd(writers, "../x", b"\xff", "b")
        client.xadd(key, {"data": "junk", "checksum": b"\xff", "attempt": "9" * 5000}, id="5-0")
        client.xadd(key, {"other": "junk"}, id="6-0")
    reader = open_reader(redis_run, "run", 1, options())
    found = reader.entries()
    assert [entry.sequence for entry in found] == [0, 4, 5]
    for entry in found[1:]:
        with pytest.raises(StreamError):
            reader.read(entry)
    assert reader.entries() == [good]
    assert reader.unreadable == 2
    assert open_writer(redis_run, "a", "run", 1, options()).append(make_group(1, RNG))[0].sequence == 6
