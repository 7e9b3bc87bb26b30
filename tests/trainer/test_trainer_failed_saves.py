"""Checkpoints that one of two ranks cannot write: real writes that fail, by a limit on the size of that process's files."""

import asyncio
import resource
from collections.abc import Sequence

import pytest
from test_trainer_sixty_steps import RANKS, Run, attempt, new_run, step_files

LIMIT_BYTES = 16384  # far below what a rank writes, and above all else that it may


def limit(pid: int, size: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def test_a_save_that_fails_on_one_of_two_ranks_is_an_alarm_and_the_next_one_succeeds(model_folders, tmp_path):
    """Of step 7 the second rank cannot write its files, of step 14 the first one; of step 21 it cannot even make the folder."""
    run = Run(new_run(tmp_path / "run", model_folders / "qwen3"), {})
    run.files.update(step_files(run.folder, 29, ()))
    in_the_way = run.folder.checkpoint(21)

    def disturb(call: str, step: int, pids: Sequence[int]) -> None:
        if call == "trained" and step in (7, 14):
            limit(pids[1 if step == 7 else 0], LIMIT_BYTES)
        elif call == "trained" and step == 21:
            in_the_way.write_text("no folder")
        elif call == "checkpoint_failed":
            in_the_way.unlink(missing_ok=True)
            for pid in pids:
                limit(pid, resource.RLIM_INFINITY)

    assert asyncio.run(attempt(run, stop_after=29, disturb=disturb)) == 0
    assert run.failures == []
    assert sorted(run.metrics) == list(range(1, 30))  # training went on
    assert sorted(run.alarms) == [7, 14, 21]
    for step, words in run.alarms.items():
        assert f"step_{step:06d}: the checkpoint could not be written" in words, words
        assert not run.folder.checkpoint(step).exists()
    assert run.saved == [28, 29]
    assert all((run.folder.checkpoint(step) / "trainer").is_dir() for step in run.saved)


@pytest.mark.slow
def test_a_last_save_that_fails_on_one_of_two_ranks_ends_both_with_its_words(model_folders, tmp_path):
    run = Run(new_run(tmp_path / "run", model_folders / "qwen3"), {})
    run.files.update(step_files(run.folder, 2, ()))

    def disturb(call: str, step: int, pids: Sequence[int]) -> None:
        if (call, step) == ("trained", 2):
            limit(pids[1], LIMIT_BYTES)

    assert asyncio.run(attempt(run, stop_after=2, disturb=disturb)) == 1
    assert run.saved == []
    assert len(run.failures) == RANKS
    assert all("step_000002: the checkpoint could not be written" in failure for failure in run.failures)
