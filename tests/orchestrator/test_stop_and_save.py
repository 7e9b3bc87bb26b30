"""STOP and SAVE in a run's control folder."""

import asyncio

import pytest

from prl.orchestrator.requests import watch_requests
from prl.runfolder.paths import RunFolder


class Heard:
    def __init__(self):
        self.stops, self.saves, self.saving = [], 0, False

    def save(self):
        self.saves += 1
        self.saving = True


def watched(folder, scenario):
    """The scenario is given the run and what was heard of it, which is looked at every hundredth of a second."""
    run, heard = RunFolder(folder), Heard()
    run.create()

    async def main():
        asked = {"stop": heard.stops.append, "save": heard.save, "saving": lambda: heard.saving}
        watching = asyncio.create_task(watch_requests(run, 0.01, **asked))
        await scenario(run, heard)
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (another process writes)
            await asyncio.sleep(0.01)


def test_each_save_is_heard_once_and_taken_away_when_it_is_done(tmp_path):
    async def scenario(run, heard):
        for count in (1, 2):
            run.save.touch()
            await until(lambda: heard.saving)
            await asyncio.sleep(0.1)
            assert run.save.exists()
            heard.saving = False
            await until(lambda: not run.save.exists())
            await asyncio.sleep(0.1)
            assert heard.saves == count
        assert heard.stops == []

    watched(tmp_path / "run", scenario)


@pytest.mark.parametrize("done", [False, True])
def test_a_save_that_is_not_done_when_the_attempt_ends_is_there_for_the_next_one(tmp_path, done):
    async def scenario(run, heard):
        run.save.touch()
        await until(lambda: heard.saving)
        heard.saving = not done

    watched(tmp_path / "run", scenario)
    assert RunFolder(tmp_path / "run").save.exists() == (not done)


def test_a_save_that_cannot_be_taken_away_counts_once(tmp_path):
    async def scenario(run, heard):
        run.save.mkdir()  # no file: unlink refuses
        await until(lambda: heard.saves == 1)
        heard.saving = False
        await asyncio.sleep(0.2)
        assert heard.saves == 1
        run.save.rmdir()
        await asyncio.sleep(0.1)
        run.save.touch()
        await until(lambda: heard.saves == 2)

    watched(tmp_path / "run", scenario)


@pytest.mark.parametrize("gone", [False, True])
def test_stop_is_told_with_its_path_also_after_the_folder_could_not_be_looked_into(tmp_path, gone):
    async def scenario(run, heard):
        if gone:
            run.control.rename(run.path / "elsewhere")
            await asyncio.sleep(0.1)
            (run.path / "elsewhere").rename(run.control)
        run.stop.touch()
        await until(lambda: heard.stops)
        assert set(heard.stops) == {f"asked to stop by {run.stop}"}

    watched(tmp_path / "run", scenario)
