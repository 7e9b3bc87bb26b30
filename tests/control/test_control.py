"""The control plane over real sockets: the token, joins, heartbeats, deadlines, failures."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time

import aiohttp
import psutil
import pytest

from prl.control import ports
from prl.control.client import ControlClient, ControlError
from prl.control.options import ControlOptions
from prl.control.ports import free_port
from prl.control.server import Bell, ControlServer
from prl.control.threaded import ThreadedClient
from prl.control.token import TokenError, authorization, create_token, is_authorized, read_token

TOKEN = "a-token"
OPTIONS = ControlOptions(heartbeat_s=0.05, lost_after_s=0.5)


class Events:
    def __init__(self):
        self.joined, self.failed = [], []


async def started(handlers=None, clock=None):
    events = Events()
    arguments = {} if clock is None else {"clock": clock}
    server = ControlServer(
        TOKEN,
        handlers or {},
        on_join=lambda member: events.joined.append(member.name),
        on_fail=lambda member, error, trace: events.failed.append((member.name, error)),
        **arguments,
    )
    return server, await server.start("127.0.0.1"), events


def test_the_token_file_is_private_and_round_trips(tmp_path):
    token = create_token(tmp_path / "token")
    assert read_token(tmp_path / "token") == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert is_authorized(authorization(token)["Authorization"], token)
    assert not is_authorized(None, token)
    assert not is_authorized(f"Bearer {token}x", token)
    for content in (b"", b"\n", token[:20].encode(), token.encode() + b"\xff"):
        (tmp_path / "token").write_bytes(content)
        with pytest.raises(TokenError, match=f"^{tmp_path}/token: is damaged and holds no token; remove it"):
            read_token(tmp_path / "token")


def test_no_route_answers_without_the_token():
    async def main():
        server, url, _ = await started()
        async with aiohttp.ClientSession() as session:
            for path in ("", "join", "heartbeat", "fail", "nothing", "a/b", "%2e%2e"):
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
                    for method in ("GET", "POST", "PUT", "DELETE"):
                        async with session.request(method, f"{url}/{path}", headers=headers) as response:
                            assert response.status == 401, (method, path, headers)
        await server.close()

    asyncio.run(main())


def test_a_header_that_is_no_text_is_refused():
    async def main():
        server, url, _ = await started()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST /join HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nContent-Length: 0\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        await server.close()

    asyncio.run(main())


def test_malformed_calls_get_an_answer_that_says_what_is_wrong():
    async def main():
        server, url, _ = await started()
        async with aiohttp.ClientSession(headers=authorization(TOKEN)) as session:
            for path, data, status, words in (
                ("nothing", b'{"role": "actor", "index": 0}', 404, "there are: fail, heartbeat, join"),
                ("heartbeat", b"not json", 400, "expected a JSON object"),
                ("heartbeat", b"[]", 400, "expected a JSON object"),
                ("heartbeat", b'{"role": "actor"}', 400, "index"),
                ("heartbeat", b'{"role": "actor", "index": 0}', 400, "progress"),
            ):
                async with session.post(f"{url}/{path}", data=data) as response:
                    assert response.status == status
                    assert words in await response.text()
        await server.close()

    asyncio.run(main())


def test_a_call_tried_again_is_carried_out_once_and_answered_alike():
    async def main():
        done = []

        async def lease(member, body):
            done.append(body["groups"])
            await asyncio.sleep(0.1)
            return {"leases": len(done)}

        server, url, _ = await started({"lease": lease})
        call = {"role": "actor", "index": 0, "groups": 3, "call": "one"}
        async with aiohttp.ClientSession(headers=authorization(TOKEN)) as session:

            async def post(body, timeout_s=5.0):
                async with session.post(f"{url}/lease", json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                    return await response.json()

            with pytest.raises(TimeoutError):
                await post(call, timeout_s=0.02)  # the answer is lost while the call is carried out
            assert await post(call) == {"leases": 1}
            assert await post(call) == {"leases": 1}
            assert await post({**call, "index": 1}) == {"leases": 2}  # another member's numbers are its own
            assert await post({**call, "call": "two"}) == {"leases": 3}
        assert done == [3, 3, 3]
        await server.close()

    asyncio.run(main())


def test_a_fault_of_the_orchestrator_itself_fails_the_run_and_not_only_the_call():
    async def main():
        async def full(member, body):
            raise OSError(28, "No space left on device")

        server, url, events = await started({"lease": full})
        async with ControlClient(url, TOKEN, "actor", 0, OPTIONS) as client:
            with pytest.raises(ControlError, match=r"500 .*No space left"):
                await client.call("lease", {}, deadline_s=5, reason="test")
        assert [name for name, _ in events.failed] == ["orchestrator 0"]
        assert "No space left on device" in events.failed[0][1]
        await server.close()

    asyncio.run(main())


def test_join_heartbeats_and_stop():
    async def main():
        server, url, events = await started()
        async with ControlClient(url, TOKEN, "actor", 3, OPTIONS) as client:
            await client.join({"problems": {"digits": 5}})
            assert events.joined == ["actor 3"]
            assert server.of_role("actor")[0].facts == {"problems": {"digits": 5}}
            client.progress("sampling")
            member = server.members["actor", 3]
            await until(lambda: member.doing == "sampling" and member.progress == 1)
            server.stopping = True
            await asyncio.wait_for(client.stopping.wait(), 5)
            assert client.lost is None
        await server.close()

    asyncio.run(main())


def test_a_silent_member_is_found_by_the_clock():
    async def main():
        now = [100.0]
        server, url, _ = await started(clock=lambda: now[0])
        async with ControlClient(url, TOKEN, "sampler", 0, OPTIONS) as client:
            await client.call("join", {"pid": 1, "host": "h", "facts": {}}, deadline_s=5, reason="test")
            assert server.silent(30) == []
            now[0] += 31
            assert [member.name for member in server.silent(30)] == ["sampler 0"]
        await server.close()

    asyncio.run(main())


def test_a_call_to_nobody_ends_at_its_deadline_and_says_what_for():
    async def main():
        url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        async with ControlClient(url, TOKEN, "actor", 0, OPTIONS) as client:
            with pytest.raises(ControlError, match=r"within 0 s \(asking for work\)"):
                await client.call("lease", {}, deadline_s=0.3, reason="asking for work")

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_call_survives_an_orchestrator_that_comes_late():
    async def main():
        port = free_port("127.0.0.1")
        async with ControlClient(f"http://127.0.0.1:{port}", TOKEN, "actor", 0, OPTIONS) as client:
            call = asyncio.create_task(client.join({}))
            await asyncio.sleep(0.2)
            server = ControlServer(TOKEN, {}, on_join=lambda m: None, on_fail=lambda m, e, t: None)
            await server.start("127.0.0.1", port)
            await asyncio.wait_for(call, 10)
        await server.close()

    asyncio.run(main())


def test_a_lost_orchestrator_stops_the_process_with_the_cause():
    async def main():
        server, url, _ = await started()
        async with ControlClient(url, TOKEN, "actor", 0, OPTIONS) as client:
            await client.join({})
            await server.close()
            await asyncio.wait_for(client.stopping.wait(), 10)
            assert "heartbeat" in str(client.lost)

    asyncio.run(main())


def silent_server():
    """A process that serves the control plane and never answers /wait; SIGSTOP silences it altogether."""
    program = f"""
import asyncio
from prl.control.server import ControlServer
async def wait(member, body):
    await asyncio.sleep(600)
async def main():
    server = ControlServer({TOKEN!r}, {{"wait": wait}}, on_join=lambda m: None, on_fail=lambda m, e, t: None)
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_a_frozen_orchestrator_is_seen_by_heartbeats_and_calls_in_flight_are_given_up():
    async def main():
        process, url = silent_server()
        told = []
        options = ControlOptions(heartbeat_s=0.05, lost_after_s=1.0)
        try:
            async with ControlClient(url, TOKEN, "actor", 0, options, on_lost=told.append) as client:
                await client.join({})
                calls = [asyncio.create_task(client.call("wait", {}, deadline_s=600, reason="test")) for _ in range(5)]
                await asyncio.sleep(2.0)
                assert not client.stopping.is_set()
                process.send_signal(signal.SIGSTOP)
                async with asyncio.timeout(5):
                    ends = await asyncio.gather(*calls, return_exceptions=True)
                assert ends == [client.lost] * 5
                assert told == [client.lost]
                assert "has answered no heartbeat for 1 s" in str(client.lost)
                with pytest.raises(ControlError, match="no heartbeat"):
                    await client.call("lease", {}, deadline_s=600, reason="test")
        finally:
            process.kill()
            process.wait()

    asyncio.run(main())


def test_calls_are_given_up_at_a_silent_orchestrator_also_while_the_run_ends():
    async def main():
        process, url = silent_server()
        try:
            async with ControlClient(url, TOKEN, "trainer", 0, ControlOptions(heartbeat_s=0.05, lost_after_s=0.5)) as client:
                await client.join({})
                client.stopping.set()
                process.send_signal(signal.SIGSTOP)
                async with asyncio.timeout(5):
                    with pytest.raises(ControlError, match="no heartbeat"):
                        await client.call("wait", {}, deadline_s=600, reason="test")
                assert client.lost is None
        finally:
            process.kill()
            process.wait()

    asyncio.run(main())


def test_a_process_that_was_held_up_itself_does_not_take_the_orchestrator_for_lost():
    async def main():
        process, url = silent_server()
        try:
            async with ControlClient(url, TOKEN, "actor", 0, ControlOptions(heartbeat_s=0.05, lost_after_s=1.0)) as client:
                await client.join({})
                for _ in range(2):
                    time.sleep(2.5)  # noqa: ASYNC251  # the event loop stands still
                    await asyncio.sleep(0.5)
                    assert not client.stopping.is_set()
        finally:
            process.kill()
            process.wait()

    asyncio.run(main())


def test_a_process_that_cannot_end_by_itself_kills_itself_with_what_it_started():
    program = """
import subprocess, sys, time
from prl.control.child import end_surely
from prl.control.client import ControlError
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
end_surely(0.5)(ControlError("the orchestrator is silent"))
print(child.pid, flush=True)
time.sleep(60)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], text=True, start_new_session=True, **pipes)
    child = psutil.Process(int(process.stdout.readline()))
    _, said = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert said.splitlines() == [
        "prl: this process ends: the orchestrator is silent",
        "prl: this process has not ended within 0.5 s by itself and kills itself",
    ]
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()


def test_a_wrong_token_is_refused_at_once():
    async def main():
        server, url, _ = await started()
        async with ControlClient(url, "wrong", "actor", 0, OPTIONS) as client:
            with pytest.raises(ControlError, match="401"):
                await client.join({})
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 5))


def test_the_threaded_client_makes_the_same_calls_and_beats_while_its_caller_computes():
    async def main():
        async def echo(member, body):
            return {"heard": body["word"], "from": member.name}

        server, url, events = await started({"echo": echo})
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        answers = []

        def work():
            with ThreadedClient(url, TOKEN, "trainer", 1, OPTIONS) as client:
                client.join({})
                answers.append(client.call("echo", {"word": "hello"}, deadline_s=5, reason="test"))
                client.progress("computing")
                loop.call_soon_threadsafe(done.set)
                finished.wait(5)
                client.call("fail", {"error": "ValueError: no", "traceback": ""}, deadline_s=5, reason="test")

        finished = threading.Event()
        thread = threading.Thread(target=work)
        thread.start()
        await asyncio.wait_for(done.wait(), 10)
        await until(lambda: server.members["trainer", 1].doing == "computing")
        finished.set()
        await asyncio.to_thread(thread.join, 5)
        assert answers == [{"heard": "hello", "from": "trainer 1"}]
        assert events.failed == [("trainer 1", "ValueError: no")]
        await server.close()

    asyncio.run(main())


def test_the_bell_wakes_every_waiter_and_keeps_deadlines():
    async def main():
        bell, state = Bell(), {"step": 0}
        waiters = [asyncio.create_task(bell.until(lambda k=k: state["step"] >= k, 5)) for k in (1, 2)]
        await asyncio.sleep(0)
        state["step"] = 1
        bell.ring()
        assert await waiters[0] is True
        assert not waiters[1].done()
        state["step"] = 2
        bell.ring()
        assert await waiters[1] is True
        assert await bell.until(lambda: False, 0.05) is False

    asyncio.run(main())


def test_a_port_on_an_address_that_is_not_ours_says_so():
    with pytest.raises(OSError, match=r"no free port on 192\.0\.2\.1"):
        free_port("192.0.2.1")


def test_a_range_of_ports_in_use_says_so(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=rf"no free port on 127\.0\.0\.1: 1 tried from {port} to {port} .* in use"):
            free_port("127.0.0.1")


async def until(condition, timeout_s=5):
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not condition():
        assert loop.time() < end, "the condition never came to hold"
        await asyncio.sleep(0.01)


def test_a_process_ends_with_the_one_that_started_it():
    """Also when that is killed without a chance to say anything."""
    child = "import time; from prl.control.parent import end_with_parent as e; e(); print('ready', flush=True); time.sleep(60)"
    parent = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
    started = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    orphan = psutil.Process(int(started.stdout.readline()))
    started.kill()
    started.wait(10)
    psutil.wait_procs([orphan], timeout=10)
    assert not orphan.is_running()
