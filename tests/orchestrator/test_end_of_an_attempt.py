"""Behind its exit.json nothing of an attempt touches the run folder."""

import asyncio
import threading

from left_behind import step_file, write_checkpoint

from prl.config.schema import Config
from prl.control.token import create_token
from prl.domains.options import DomainOptions
from prl.flow.dispatcher import Dispatcher
from prl.flow.ids import RolloutId
from prl.orchestrator.binding import Plan
from prl.orchestrator.main import Orchestrator
from prl.orchestrator.options import RunOptions
from prl.orchestrator.resume import dispatcher_settings, find_start
from prl.runfolder import manifest
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.trainer.options import ModelOptions

CONFIG = Config(run=RunOptions(name="r", id="1", steps=10), domains=(DomainOptions(name="digits"),))


def test_an_attempt_has_ended_only_when_nothing_is_read_or_set_aside_any_more(tmp_path, monkeypatch):
    """It is cancelled while a slow filesystem is asked for a checkpoint. That one is damaged, and behind the one before lies a
    step file that nobody was handed out rollouts for."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    write_model_folder(ModelOptions(init="random", architecture="qwen2"), run.model)
    for step in (1, 2):
        write_checkpoint(run, step, Dispatcher(dispatcher_settings(CONFIG)).state())
    (run.checkpoint(2) / "trainer/__0_0.distcp").write_bytes(b"weights of 3")
    foreign = step_file(run, 2, [RolloutId(0, "digits/1", 0, 0, 0)], 2).path
    reading, released = threading.Event(), threading.Event()

    def slow(*arguments, part_of=manifest.part_of):
        reading.set()
        assert released.wait(30)
        return part_of(*arguments)

    monkeypatch.setattr(manifest, "part_of", slow)

    async def main():
        start = find_start(run, CONFIG, parts=False)
        assert start.resume.step == 2
        orchestrator = Orchestrator(run, CONFIG, Plan(1, (), (), 1), start, create_token(run.token))
        await orchestrator.serve("127.0.0.1")
        leading = asyncio.create_task(orchestrator.lead())
        assert await asyncio.to_thread(reading.wait, 30)
        orchestrator.shutdown.cancel("enough")
        await asyncio.sleep(2.5)  # one second of it is for other causes
        assert not run.exit(1).exists()
        released.set()
        assert (await leading).cause == "enough"

    asyncio.run(asyncio.wait_for(main(), 60))
    assert run.exit(1).exists()
    assert foreign.exists()
    assert not run.quarantine.exists()
    assert find_start(run, CONFIG).resume.step == 1  # who looks to the end sets it aside
    assert not foreign.exists()
