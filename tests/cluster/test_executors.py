"""submitit's side of a Slurm job: states folded, the first error of any task, and no job left behind by a failed sbatch."""

import pickle

import pytest
from stand_ins import stand_in
from submitit.core.utils import FailedJobError

from prl.cluster.claims import SubmissionError
from prl.cluster.executors import ScriptExecutor, SlurmJob, SlurmWatcher
from prl.cluster.run import ProgramError
from prl.cluster.script import submitit_folder
from prl.cluster.split import make_split
from prl.cluster.submission import submit
from prl.config.load import replace
from prl.config.schema import Config
from prl.runfolder.paths import RunFolder

LEFT = r"Is a directory.*; job 7 was sent and is left \(scancel: exit code 1 .*\): end it with scancel 7"
HEADER = "JobID|State|ExitCode|Start|End|NodeList\n"


def test_rows_of_a_heterogeneous_job_become_one():
    text = HEADER + (
        "63+0|FAILED|1:0|None|None|n1\n63+0.batch|FAILED|1:0|None|None|n1\n63+1|CANCELLED by 0|0:0|None|None|n[2-3]\n"
        "70|COMPLETED|0:0|None|None|n4\n70.batch|COMPLETED|0:0|None|None|n4\n"
    )
    assert SlurmWatcher().read_info(text.encode()) == {
        "63": {"JobID": "63", "State": "FAILED", "NodeList": "n1,n[2-3]"},
        "70": {"JobID": "70", "State": "COMPLETED", "NodeList": "n4"},
    }
    assert SlurmWatcher().read_info(b"") == SlurmWatcher().read_info(HEADER) == {}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    return lambda **lines: stand_in(tmp_path, monkeypatch, **{"srun": ":", "sacct": ":", "scancel": ":", **lines})


@pytest.mark.parametrize(("state", "done"), [("SUSPENDED", False), ("CONFIGURING", False), ("TIMEOUT", True), ("", False)])
def test_a_job_that_is_suspended_or_starts_has_not_ended(programs, state, done):
    row = f"63|{state}|0:0|None|None|n1\\n" if state else ""
    calls = programs(sacct=f"printf '{HEADER.strip()}\\n{row}'")
    watcher = SlurmWatcher()
    assert watcher.is_done("63", mode="force") == done
    assert calls.read_text() == "sacct -X -P -o JobID,State,ExitCode,Start,End,NodeList -j 63\n"


def result(folder, task, outcome, value):
    (folder / f"63_{task}_result.pkl").write_bytes(pickle.dumps((outcome, value)))


def test_an_error_of_any_task_is_raised_at_once_although_the_first_task_could_say_nothing(programs, tmp_path):
    programs(sacct=f"printf '{HEADER.strip()}\\n63+0|FAILED|1:0|None|None|n1\\n63+1|FAILED|1:0|None|None|n[2-3]\\n'")
    job = SlurmJob(folder=tmp_path, job_id="63", tasks=range(3))
    result(tmp_path, 2, "error", "ValueError: the cause of it all")
    with pytest.raises(FailedJobError, match="job 63 failed in task 2:\nValueError: the cause of it all"):
        job.results()


def test_results_of_all_tasks(programs, tmp_path):
    programs()
    job = SlurmJob(folder=tmp_path, job_id="63", tasks=range(2))
    for task in range(2):
        result(tmp_path, task, "success", task * 10)
    assert (job.results(), job.exception()) == ([0, 10], None)


def test_arrays_are_refused(programs, tmp_path):
    calls = programs(sbatch="echo Submitted batch job 7")
    executor = ScriptExecutor(tmp_path / "submitit", tmp_path / "submission.sh", 2)
    with pytest.raises(ValueError, match="Slurm refuses arrays of heterogeneous jobs"):
        executor.map_array(print, [1, 2])
    assert not calls.exists()
    job = executor.submit(print)
    assert (job.job_id, job.num_tasks) == ("7", 2)
    assert calls.read_text() == f"sbatch {tmp_path}/submission.sh\n"


def test_a_job_has_the_users_language_and_times(programs, tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("SLURM_TIME_FORMAT", raising=False)
    programs(sbatch=f"env >{tmp_path}/environment; echo Submitted batch job 7")
    ScriptExecutor(tmp_path / "submitit", tmp_path / "submission.sh", 2).submit(print)
    lines = (tmp_path / "environment").read_text().splitlines()
    assert "LC_ALL=C.UTF-8" in lines
    assert not any(line.startswith("SLURM_TIME_FORMAT=") for line in lines)


def test_what_a_failed_sbatch_has_sent_nonetheless_is_cancelled(programs, tmp_path):
    script = tmp_path / "submission.sh"
    queue = f"printf '12|/elsewhere/submission.sh\\n70+0|{script}\\n70+1|{script}\\n'"
    calls = programs(sbatch="echo 'sbatch: error: Unexpected message received' >&2; exit 1", squeue=queue)
    with pytest.raises(ProgramError, match=r"Unexpected message received; it had sent job 70 nonetheless, which was cancelled"):
        ScriptExecutor(tmp_path / "submitit", script, 2).submit(print)
    assert calls.read_text().splitlines()[-1] == "scancel 70"
    programs(sbatch="exit 1", squeue="echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    with pytest.raises(ProgramError, match=r"whether there is a job nonetheless is not known \(squeue: .*squeue --me"):
        ScriptExecutor(tmp_path / "submitit", script, 2).submit(print)
    calls.unlink()
    programs(sbatch="exit 1", squeue="echo '12|/elsewhere/submission.sh'")
    with pytest.raises(ProgramError, match=r"it printed nothing$"):
        ScriptExecutor(tmp_path / "submitit", script, 2).submit(print)
    assert "scancel" not in calls.read_text()


@pytest.mark.parametrize(("scancel", "words"), [(":", "the job was not accepted: .*Is a directory"), ("exit 1", LEFT)])
def test_a_job_whose_record_cannot_be_kept_is_taken_back_or_named(programs, tmp_path, scancel, words):
    config = replace(Config(), run={"folder": str(tmp_path / "run")}, cluster={"nodes": 2})
    run = RunFolder(config.run.folder)
    submitit_folder(run, 1).mkdir(parents=True)
    run.submission(1).mkdir()  # in the way of the record
    calls = programs(sbatch="echo Submitted batch job 7", scancel=scancel)
    with pytest.raises(SubmissionError, match=words):
        submit(config, make_split(config), run, 1, print)
    assert calls.read_text().splitlines()[-1] == "scancel 7"
