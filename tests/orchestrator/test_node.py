"""A node agent with children of a few lines that stand for samplers: it starts again what the orchestrator wants to have again,
and kills what that has given up."""

import asyncio
import errno
import time
from pathlib import Path

import psutil
import pytest
from agent_rig import Orchestrator, run_of, started

import prl.control.child
import prl.orchestrator.node
from prl.control.options import ControlOptions
from prl.orchestrator.node import run_agent
from prl.orchestrator.outcome import MEMORY_KILL

SLEEPER = "import os, time; print(os.getpid(), os.environ['PRL_PORT'], flush=True); time.sleep(600)"


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path, SLEEPER)


def test_a_sampler_that_died_is_started_again_and_one_that_was_given_up_is_killed(run, tmp_path):
    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=2)
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.5)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        first, _ = await started(run, 0, 0)
        other, _ = await started(run, 1, 0)
        psutil.Process(first).kill()
        second, _ = await started(run, 0, 1)
        orchestrator.to_end = [["sampler 0", 0], ["sampler 1", 0]]  # of sampler 0 a process that is gone already
        orchestrator.bell.ring()
        third, _ = await started(run, 1, 1)
        assert not psutil.pid_exists(other)
        assert psutil.pid_exists(second)
        psutil.Process(third).kill()  # and no further one is granted
        async with asyncio.timeout(10):
            while len(orchestrator.ended) < 3:  # noqa: ASYNC110 (heard over HTTP)
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        assert len((run.logs(1) / "sampler-1.log").read_text().splitlines()) == 2
        orchestrator.server.stopping, orchestrator.server.grace_s = True, 0.2
        orchestrator.bell.ring()
        await asyncio.wait_for(agent, 20)
        assert not psutil.pid_exists(second)
        killed = [(f"sampler {index}", f"sampler {index} was ended by SIGKILL") for index in (0, 1, 1)]
        assert orchestrator.ended == [*killed, "node done"]
        await orchestrator.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


CHATTERER = "import time; print('all is well\\n' * 2**17 + 'the last line', flush=True); time.sleep(600)"


def test_the_logs_of_those_who_talk_too_much_are_cut_down(tmp_path, monkeypatch):
    monkeypatch.setattr(prl.orchestrator.node, "USAGE_S", 0.2)
    run = run_of(tmp_path, CHATTERER)

    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=0)
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.5, log_mib=1)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        logs = [run.logs(1) / f"sampler-{index}.log" for index in (0, 1)]
        async with asyncio.timeout(20):
            while not all(log.exists() and log.read_text().startswith("prl: 1") for log in logs):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        orchestrator.server.stopping, orchestrator.server.grace_s = True, 0.2
        orchestrator.bell.ring()
        await asyncio.wait_for(agent, 20)
        await orchestrator.server.close()
        for log in logs:
            assert 2**17 < log.stat().st_size < 2**19
            assert log.read_text().splitlines()[-1] == "the last line"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_start_that_was_given_up_before_it_was_made_is_killed_as_soon_as_it_is_there(run, tmp_path):
    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=2)
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.5)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        first, _ = await started(run, 0, 0)
        orchestrator.to_end = [["sampler 0", 1]]
        orchestrator.bell.ring()
        await asyncio.sleep(0.3)  # the agent knows it by then
        assert psutil.pid_exists(first)
        psutil.Process(first).kill()
        async with asyncio.timeout(20):
            while len(orchestrator.ended) < 2:  # noqa: ASYNC110 (heard over HTTP)
                await asyncio.sleep(0.02)
        assert orchestrator.ended == [("sampler 0", "sampler 0 was ended by SIGKILL")] * 2
        orchestrator.server.stopping, orchestrator.server.grace_s = True, 0.2
        orchestrator.bell.ring()
        await asyncio.wait_for(agent, 20)
        await orchestrator.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


LISTENER = """
import os, time
from prl.control.child import dump_stacks_when_asked
print(os.getpid(), os.environ["PRL_PORT"], flush=True)
def waiting_for_nothing():
    time.sleep(600)
if os.environ["PRL_INDEX"] == "0":
    dump_stacks_when_asked()
    print("listens", flush=True)
waiting_for_nothing()
"""


def test_children_that_listen_write_their_stacks_into_their_logs_and_the_others_live_on(run, tmp_path):
    package, stub = Path(prl.control.child.__file__).parents[1], tmp_path / "stub/prl"
    (stub / "sampler.py").unlink()
    for path in package.iterdir():
        if path.name not in ("sampler", "__init__.py"):
            (stub / path.name).symlink_to(path)
    (stub / "sampler").mkdir()
    (stub / "sampler/options.py").symlink_to(package / "sampler/options.py")
    (stub / "sampler/__main__.py").write_text(LISTENER)

    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=0)
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.2)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        listener, deaf = [await started(run, index, 0) for index in (0, 1)]
        log = run.logs(1) / "sampler-0.log"
        for words in ("listens", "in waiting_for_nothing"):
            async with asyncio.timeout(20):
                while words not in log.read_text():  # noqa: ASYNC110 (written by another process)
                    await asyncio.sleep(0.02)
            orchestrator.dumps = 1
            orchestrator.bell.ring()
        assert log.read_text().count("most recent call first") >= 1
        assert psutil.pid_exists(listener[0])
        assert psutil.pid_exists(deaf[0])
        assert orchestrator.ended == []
        orchestrator.server.stopping = True
        orchestrator.bell.ring()
        await asyncio.wait_for(agent, 20)
        await orchestrator.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_run_that_stops_starts_nothing_again(run, tmp_path):
    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=2)

        async def ended(member, body):
            orchestrator.server.stopping = True
            orchestrator.bell.ring()
            return {"restart_after_s": 30.0}

        orchestrator.server._handlers["child_ended"] = ended
        url = await orchestrator.server.start("127.0.0.1")
        agent = asyncio.create_task(
            run_agent(run, 1, 1, "127.0.0.1", url, "token", ControlOptions(heartbeat_s=0.1, stop_s=0.2))
        )
        first, _ = await started(run, 0, 0)
        await started(run, 1, 0)
        psutil.Process(first).kill()
        await asyncio.wait_for(agent, 20)
        assert len((run.logs(1) / "sampler-0.log").read_text().splitlines()) == 1
        await orchestrator.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_child_that_the_kernel_killed_out_of_memory_is_told_from_others(run, tmp_path, monkeypatch):
    """The kernel's count stands in for such a kill."""
    counted = [0]
    monkeypatch.setattr(prl.orchestrator.node, "memory_kills", lambda: counted[0])

    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=2)
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.2)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        for number, kills in enumerate((1, 1)):
            first, _ = await started(run, 0, number)
            counted[0] = kills
            psutil.Process(first).kill()
            await started(run, 0, number + 1)
        orchestrator.server.stopping = True
        orchestrator.bell.ring()
        await asyncio.wait_for(agent, 20)
        killed = ("sampler 0", "sampler 0 was ended by SIGKILL")
        assert orchestrator.ended[:2] == [(killed[0], f"{killed[1]}: {MEMORY_KILL}"), killed]
        await orchestrator.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("fault", ["may not be read", "does not answer"])
def test_a_run_goes_on_where_temporary_files_cannot_be_looked_through_nor_be_written(run, tmp_path, monkeypatch, capfd, fault):
    def look():
        if fault == "does not answer":
            time.sleep(5)
        raise PermissionError("the folder may not be read")

    def write(*_):
        raise OSError(errno.ENOSPC, "there is no room")

    monkeypatch.setattr(prl.orchestrator.clean_up, "clean_dead", look)
    monkeypatch.setattr(prl.orchestrator.clean_up, "record", write)
    monkeypatch.setattr(prl.orchestrator.node, "CLEAN_S", 0.2)

    async def main():
        orchestrator = Orchestrator(tmp_path / "stub", restarts=0)
        url = await orchestrator.server.start("127.0.0.1")
        options = ControlOptions(heartbeat_s=0.1, stop_s=0.2)
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options))
        for index in (0, 1):
            await started(run, index, 0)
        orchestrator.server.stopping, orchestrator.server.grace_s = True, 0.2
        orchestrator.bell.ring()
        await asyncio.wait_for(agent, 20)
        assert orchestrator.ended == ["node done"]
        await orchestrator.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    said = "".join(capfd.readouterr())
    assert ("no answer within 0.2 s" if fault == "does not answer" else "the folder may not be read") in said
    assert "does not tell what is to be removed: [Errno 28] there is no room" in said


def test_a_preflight_gives_way_to_the_end_of_the_run_and_sigterm_is_told_meanwhile(run, tmp_path):
    """The node waits for a file of the run folder that does not come."""

    async def main():
        orchestrator, told = Orchestrator(tmp_path / "stub", restarts=0), asyncio.Event()

        async def preflight(member, body):
            return {"wanted": {"visible_s": 50.0, "devices": False, "listens": False, "limit_s": 50.0}}

        async def clock(member, body):
            return {"time_s": 0.0}

        async def terminated(member, body):
            told.set()
            return {}

        orchestrator.server._handlers["preflight"] = preflight
        orchestrator.server.add({"clock": clock, "terminated": terminated})
        url = await orchestrator.server.start("127.0.0.1")
        options, ends = ControlOptions(heartbeat_s=0.1, stop_s=0.2), asyncio.Event()
        agent = asyncio.create_task(run_agent(run, 1, 1, "127.0.0.1", url, "token", options, ends))
        await asyncio.sleep(0.5)
        ends.set()
        await asyncio.wait_for(told.wait(), 5)
        assert not agent.done()
        orchestrator.server.stopping = True
        await asyncio.wait_for(agent, 5)
        assert orchestrator.ended == ["node done"]
        await orchestrator.server.close()

    asyncio.run(asyncio.wait_for(main(), 60))
