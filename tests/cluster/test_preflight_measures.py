"""What a node measures of itself, and what goes between two of them, on this machine."""

import asyncio
import json
import os
import shutil
import socket
import threading
import time
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.cluster.preflight.devices import Device, Devices
from prl.cluster.preflight.measure import (
    Clock,
    NodeFacts,
    Room,
    compare_clocks,
    in_thread,
    measure_node,
    read_when_visible,
    room_in,
)
from prl.cluster.preflight.storage import measure_storage
from prl.cluster.preflight.transfer import SEND_S, Listener, transfer
from prl.control.ports import PORTS, count_free_ports


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_the_clocks_offset_is_known_within_its_error(offset_s, ways):
    """`ways`: how long each question and its answer take; the other's clock is the true one."""
    true, left = [1000.0], list(ways)

    async def ask():
        there, back = left.pop(0)
        true[0] += there
        told = true[0]
        true[0] += back
        return told

    found = run(compare_clocks(ask, lambda: true[0] + offset_s, len(ways)))
    assert abs(found.offset_s - offset_s) <= found.error_s + 1e-6
    assert found.error_s == pytest.approx(min(there + back for there, back in ways) / 2, abs=1e-6)


def test_a_file_that_comes_late_is_read_and_one_that_does_not_is_named(tmp_path):
    path = tmp_path / "late" / "canary"

    def write():
        path.parent.mkdir()
        path.write_text("word")

    writer = threading.Timer(0.5, write)
    writer.start()
    assert read_when_visible(path, 30) == "word"
    writer.join()
    with pytest.raises(TimeoutError, match=r"other, which prl-submit wrote, .*for 0.1 s: its folder is there, and does not"):
        read_when_visible(path.with_name("other"), 0.1)
    shutil.rmtree(path.parent)
    with pytest.raises(TimeoutError, match="No such file"):
        read_when_visible(path, 0.1)


def test_work_that_does_not_come_back_is_left_behind():
    release = threading.Event()

    async def main():
        with pytest.raises(TimeoutError, match=r"^no answer within 0.1 s$"):
            await in_thread(lambda: release.wait(30), 0.1)
        with pytest.raises(TimeoutError, match="of its own"):
            await in_thread(fail, 30)
        assert await in_thread(threading.get_ident, 30) != threading.get_ident()

    def fail():
        raise TimeoutError("of its own")

    began = time.monotonic()
    run(main())
    assert time.monotonic() - began < 20  # nothing waits for the thread
    release.set()


def test_room_is_what_the_system_says(tmp_path):
    found, told = room_in(tmp_path), shutil.disk_usage(tmp_path)
    assert found.folder == str(tmp_path)
    assert abs(found.free_bytes - told.free) < 2**30  # others write meanwhile
    storage = run(measure_storage(tmp_path))
    assert (storage.room.folder, storage.failed) == (str(tmp_path), ())
    (words,) = run(measure_storage(tmp_path / "missing")).failed
    assert "No such file" in words


def test_free_ports_are_counted(monkeypatch):
    monkeypatch.setattr("prl.control.ports.PORTS", PORTS[:400])
    before = count_free_ports("127.0.0.5")
    assert 390 < before <= 400
    taken = []
    for port in PORTS[:100]:
        taken.append(socket.socket())
        taken[-1].bind(("127.0.0.5", port))
    assert count_free_ports("127.0.0.5") == before - 100
    for one in taken:
        one.close()
    with pytest.raises(OSError, match=r"no free port on 192\.0\.2\.1"):
        count_free_ports("192.0.2.1")


def test_a_node_measures_all_and_tells_what_it_could_not(tmp_path):
    (tmp_path / "canary").write_text("word")

    async def ask_time():
        return time.time() + 100

    async def measure(canary, host):
        return await measure_node(canary, 0.1, host, devices=False, ask_time=ask_time)

    well = run(measure(tmp_path / "canary", "127.0.0.1"))
    assert (well.canary, well.failed, well.devices) == ("word", {}, None)
    assert well.clock.offset_s == pytest.approx(-100, abs=1)
    assert 0 < well.memory_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 100 < well.ports <= len(PORTS)
    ill = run(measure(tmp_path / "other", "192.0.2.1"))
    assert sorted(ill.failed) == ["ports", "the run folder"]
    assert (ill.canary, ill.ports) == (None, None)
    assert ill.room == well.room or ill.room.folder == well.room.folder


def test_facts_survive_their_way_as_json():
    device = Device(0, "H200", 5, None, True, None, "")
    for facts in (
        NodeFacts("word", Clock(0.1, 0.2), 5, Room("/tmp", 7, None), 9, Devices((device,), ("said",)), {}),
        NodeFacts(None, None, None, None, None, None, {"memory": "no answer"}),
    ):
        assert NodeFacts.of(json.loads(json.dumps(asdict(facts)))) == facts
    with pytest.raises(KeyError):
        NodeFacts.of({"canary": "word"})


def test_bytes_go_both_ways_one_node_after_another():
    async def main():
        listener = Listener("127.0.0.1", "token")
        serving = asyncio.create_task(listener.serve())
        began = time.monotonic()
        found = await asyncio.gather(*(transfer("127.0.0.1", listener.port, "token", 30) for _ in range(3)))
        took_s = time.monotonic() - began
        assert not serving.done()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
        return found, took_s

    found, took_s = run(main())
    assert all(speed > 10 for pair in found for speed in pair)
    assert took_s >= 3 * 2 * SEND_S  # none beside another


def test_whoever_lacks_the_token_gets_nothing_and_does_not_hold_up_others(monkeypatch):
    monkeypatch.setattr("prl.cluster.preflight.transfer.GREETING_S", 0.3)

    async def main():
        listener = Listener("127.0.0.1", "token")
        serving = asyncio.create_task(listener.serve())
        with pytest.raises(ConnectionError, match="did not accept the run's token"):
            await transfer("127.0.0.1", listener.port, "other", 30)
        silent = socket.create_connection(("127.0.0.1", listener.port))
        garbage = socket.create_connection(("127.0.0.1", listener.port))
        garbage.sendall(b"\x00\xff" * 4000)
        assert min(await transfer("127.0.0.1", listener.port, "token", 30)) > 0
        silent.close()
        garbage.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            await transfer("127.0.0.1", listener.port, "token", 30)

    run(main())


def test_a_node_that_never_answers_is_given_up():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            port = deaf.getsockname()[1]
            with pytest.raises(TimeoutError, match=rf"no answer from 127.0.0.1:{port} within 0.3 s"):
                await transfer("127.0.0.1", port, "token", 0.3)

    run(main())
