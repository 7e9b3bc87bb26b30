"""A Slurm that calls the state of a run's job a word that prl does not know: whoever asks is told so, nothing is taken for
another state, and exit.json says it. No Slurm here has such a state: its programs are asked, and their answers changed."""

import shutil
import signal
import subprocess
from pathlib import Path

import lab_cluster
import psutil
import pytest
from lab_runs import said
from small_runs import small_run, wait_for_processes
from stand_ins import stand_in

from prl.cli import submit
from prl.cluster.record import read_record

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.slurm_netns, pytest.mark.deadline(600)]
AGAIN_S = 120.0  # until the next job of a chain has started
TOLD_S = 60.0  # until a command that follows the job has asked Slurm again
SAYS = "Slurm calls the job's state 'FROZEN', which prl does not know"
# The second column of what squeue and sacct are asked for, and a field of scontrol's.
FROZEN = r"""
s/^([^|]+)\|[A-Z_]+( by [0-9]+)?\|/\1|FROZEN|/
s/JobState=[A-Z_]+/JobState=FROZEN/g
"""


@pytest.fixture
def states(tmp_path, monkeypatch) -> Path:
    """What sed does to all that squeue, sacct and scontrol print from now on, here and on the nodes: nothing yet."""
    script = tmp_path / "states.sed"
    script.touch()
    changed = f'[ -z "$printed" ] || echo "$printed" | sed -Ef {script}'
    lines = {
        name: f'printed=$({shutil.which(name)} "$@"); code=$?\n{changed}\nexit $code'
        for name in ("squeue", "sacct", "scontrol")
    }
    stand_in(tmp_path, monkeypatch, **lines)
    return script


def asked(capsys, *arguments: str) -> tuple[int, str]:
    """prl-submit's exit code, and what it prints."""
    capsys.readouterr()
    code = submit.main([*arguments])
    return code, "".join(capsys.readouterr())


def batch_script(node: str) -> psutil.Process:
    (found,) = [process for process in lab_cluster.processes(node) if process.cmdline()[-1].endswith("/slurm_script")]
    return found


def test_whoever_looks_is_told_and_who_cancels_the_run_does(tmp_path, slurm_cluster, states, capsys):
    with small_run(tmp_path / "run", slurm_cluster) as run:
        wait_for_processes(run)
        place = str(run.folder)
        with subprocess.Popen(
            ["prl-submit", "--status", place, "--follow"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as follower:
            assert any("step 0/" in line for line in follower.stdout)  # from then on Slurm is asked again
            states.write_text(FROZEN)
            for code, told in (asked(capsys, "--status", place), asked(capsys, "--resume", place)):
                assert code in (1, 2)
                assert SAYS in told
            told, _ = follower.communicate(timeout=TOLD_S)
        assert follower.returncode == 1
        assert f"{SAYS}; see scontrol show job; job {run.job} is left as it is: see squeue -j {run.job}" in told
        code, told = asked(capsys, "--cancel", place)
        assert code == 0
        assert f"{SAYS}; see scontrol show job; it is cancelled whatever it is" in told
        assert f"job {run.job}" in told
        ended = run.ended()
        assert said(ended) == ("cancelled", "cancelled", "stop")
        assert ended.cause.startswith(f"cancelled by SIGTERM, and Slurm does not say why: {SAYS}")
        run.is_clean()
        states.write_text("")
        assert run.states() == ["CANCELLED"] * 2
        code, told = asked(capsys, "--status", place)
        assert code == 0
        assert ended.cause in told


def test_an_orchestrator_that_is_killed_is_not_taken_for_one_whose_job_goes_on(tmp_path, slurm_cluster, states):
    with small_run(tmp_path / "run", slurm_cluster, "cluster.requeue=true") as run:
        wait_for_processes(run)
        states.write_text(FROZEN)
        run.agent(run.hosts()[0]).send_signal(signal.SIGKILL)
        ended = run.ended()
        assert said(ended) == ("failed", "killed", "stop")
        assert f"; the job is not put into the queue again: {SAYS}" in ended.cause
        run.is_clean()
        states.write_text("")
        lab_cluster.wait_until(lambda: set(run.states()) == {"FAILED"}, AGAIN_S, run.states)  # both components, once
        assert run.folder.attempts() == [1]


def test_the_next_job_of_a_chain_says_it_of_one_that_could_not_say_how_it_ended(tmp_path, slurm_cluster, states):
    with small_run(tmp_path / "run", slurm_cluster, "cluster.chain=2") as run:
        wait_for_processes(run)
        states.write_text(FROZEN)
        first, _ = run.hosts()
        for process in (run.agent(first), batch_script(first)):
            process.send_signal(signal.SIGKILL)
        lab_cluster.slurm("scontrol", "release", *read_record(run.folder, 1).followers)
        wait_for_processes(run, 2, AGAIN_S)
        ended = run.ended()
        assert said(ended) == ("failed", "error", "chain")
        assert SAYS in ended.cause
        assert SAYS in ended.next_words
        states.write_text("")
        assert submit.main(["--cancel", str(run.folder)]) == 0
        assert said(run.ended(2)) == ("cancelled", "cancelled", "stop")
        run.is_clean()
