import sys
from datetime import datetime

import pytest

from prl.cluster.executors import SlurmWatcher, fold_states
from prl.cluster.run import Output, ProgramError, run
from prl.cluster.slurm import SlurmError, check_slurm, job_state, requeue, why_terminated
from prl.cluster.split import make_split
from prl.config.load import replace
from prl.config.schema import Config


def python(code, **options):
    return run([sys.executable, "-c", code], **options)


def test_output_and_code():
    assert python("print('a b'); import sys; sys.exit(3)", check=False) == Output(3, "a b\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-program-anywhere"], "no-such-program-anywhere: no such program"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "no answer within 0.2 s"),
        ([sys.executable, "-c", "import sys; sys.exit('broken')"], "exit code 1.*broken"),
    ],
)
def test_failures_say_which_program_and_how(arguments, words):
    with pytest.raises(ProgramError, match=words):
        run(arguments, timeout_s=0.2 if "sleep" in arguments[-1] else 10.0)


def test_no_shell_looks_at_the_arguments():
    assert run([sys.executable, "-c", "import sys; print(sys.argv[1])", "$HOME; ls *"]).out == "$HOME; ls *\n"


@pytest.mark.parametrize(
    ("states", "folded"),
    [
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["COMPLETED", "RUNNING"], "RUNNING"),
        (["FAILED", "NODE_FAIL"], "NODE_FAIL"),
        (["CANCELLED by 0", "FAILED"], "FAILED"),
        (["CANCELLED+", "COMPLETED"], "CANCELLED"),
        (["TIMEOUT", "OUT_OF_ME+"], "OUT_OF_ME"),  # an unknown word is the worst
        ([""], "UNKNOWN"),
    ],
)
def test_one_state_for_all_components(states, folded):
    assert fold_states(states) == folded


def test_rows_of_a_heterogeneous_job_become_one():
    text = (
        "JobID|State|NodeList\n63+0|FAILED|n1\n63+0.batch|FAILED|n1\n63+0.0|FAILED|n1\n63+1|CANCELLED by 0|n[2-3]\n"
        "70|COMPLETED|n4\n70.batch|COMPLETED|n4\n"
    )
    assert SlurmWatcher().read_info(text.encode()) == {
        "63": {"JobID": "63", "State": "FAILED", "NodeList": "n1,n[2-3]"},
        "70": {"JobID": "70", "State": "COMPLETED", "NodeList": "n4"},
    }


def answers(**by_program):
    """A runner that gives recorded output."""
    return lambda arguments, **_: by_program[arguments[0]]


UP = Output(0, "Slurmctld(primary) at login is UP\n", "")


def node(name, cpus=64, memory_mib=515000, resources="gpu:h100:4(S:0-1),nic:2"):
    return f"{name}|{cpus}|{memory_mib}|{resources}\n"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cpus_per_node": 64, "memory_per_node_gib": 502.5, "gpus_per_node": 4}, None),
        (
            {"cpus_per_node": 65},
            "3 nodes with 65 CPUs each, but the cluster has 1 of that kind, its nodes having at most 128 CPUs;",
        ),
        (
            {"memory_per_node_gib": 503.0},
            "3 nodes with 503 GiB of memory each, .*has 1 of that kind, its nodes having at most 1000 GiB",
        ),
        (
            {"gpus_per_node": 5, "cpus_per_node": 9},
            "9 CPUs and 5 GPUs each, .*has 0 of .*128 CPUs and 4 GPUs; .*cluster.partition",
        ),
    ],
)
def test_nodes_that_have_what_is_asked_of_each(asked, words):
    """Three nodes alike, though their lines name their GPUs otherwise, and a larger one without."""
    config = replace(Config(), cluster=asked)
    lines = [
        node("n1", resources="gpu:(null):4(S:0,1)"),
        node("n2", resources="nic:2,gpu:4(S:0-1)"),
        node("n3", resources="gpu:a:1,gpu:b:3"),
        node("big", 128, 1024000, "(null)"),
    ]
    runner = answers(scontrol=UP, sinfo=Output(0, "".join(lines), ""))
    if words is None:
        check_slurm(config, make_split(config, nodes=3), runner)
    else:
        with pytest.raises(SlurmError, match=words):
            check_slurm(config, make_split(config, nodes=3), runner)


def test_an_answer_of_sinfo_that_cannot_be_read():
    with pytest.raises(SlurmError, match=r"sinfo: its answer to sinfo -h -N .* cannot be read"):
        check_slurm(Config(), make_split(Config(), nodes=2), answers(scontrol=UP, sinfo=Output(0, "n1|many|1|(null)\n", "")))


def test_enough_nodes_and_a_controller():
    split = make_split(Config(), nodes=3)
    check_slurm(Config(), split, answers(scontrol=UP, sinfo=Output(0, "".join(map(node, ("n1", "n2", "n2", "n3"))), "")))
    with pytest.raises(SlurmError, match="asks for 3 nodes, but the cluster has 2"):
        check_slurm(Config(), split, answers(scontrol=UP, sinfo=Output(0, "".join(map(node, ("n1", "n2", "n2"))), "")))
    config = replace(Config(), cluster={"partition": "gpu"})
    with pytest.raises(SlurmError, match=r"cluster\.partition = gpu: Slurm knows no nodes"):
        check_slurm(config, split, answers(scontrol=UP, sinfo=Output(0, "", "")))
    with pytest.raises(SlurmError, match=r"no Slurm controller answers .*is DOWN"):
        check_slurm(Config(), split, answers(scontrol=Output(1, "Slurmctld(primary) at login is DOWN\n", "")))


def test_a_job_that_left_the_queue_is_looked_up_in_the_accounting():
    gone = Output(1, "", "slurm_load_jobs error: Invalid job id specified\n")
    assert job_state("63", answers(squeue=Output(0, "RUNNING\nRUNNING\n", ""))) == "RUNNING"
    assert job_state("63", answers(squeue=gone, sacct=Output(0, "FAILED\nCANCELLED by 0\n", ""))) == "FAILED"
    assert job_state("63", answers(squeue=gone, sacct=Output(1, "", "Slurm accounting storage is disabled\n"))) is None
    with pytest.raises(ProgramError, match=r"sacct: .*Connection refused"):
        job_state(
            "63", answers(squeue=gone, sacct=Output(1, "", "sacct: error: Problem talking to the database: Connection refused"))
        )
    with pytest.raises(ProgramError, match="Unable to contact"):
        job_state("63", answers(squeue=Output(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")))


# As Slurm 22.05 prints the two components of a heterogeneous job, shortened.
SHOWN = (
    "JobId=4 HetJobId=4 HetJobOffset={offset} JobName=het1 JobState={state} Reason=None Dependency=(null) Requeue=1 Restarts=0 "
    "RunTime=00:04:50 TimeLimit=00:05:00 TimeMin=N/A StartTime=2026-11-29T16:11:29 EndTime={end} Deadline=N/A "
    "PreemptEligibleTime=2026-11-29T16:11:29 PreemptTime={preempted} SuspendTime=None Command=/home/u/my job=1/x\n"
)
LIMIT = "2026-11-29T16:16:29"


@pytest.mark.parametrize(
    ("state", "end", "preempted", "at", "why"),
    [
        ("RUNNING", LIMIT, "2026-11-29T16:13:00", "16:13:00", "preempted"),
        ("PREEMPTED", "2026-11-29T16:13:00", "2026-11-29T16:13:00", "16:13:00", "preempted"),
        ("TIMEOUT", "2026-11-29T16:16:40", "None", "16:16:40", "time limit"),
        ("RUNNING", LIMIT, "None", "16:16:29", "time limit"),
        ("RUNNING", LIMIT, "None", "16:13:00", "cancelled"),  # scancel --signal=TERM
        ("CANCELLED", "2026-11-29T16:13:00", "None", "16:13:00", "cancelled"),
        ("RUNNING", "Unknown", "None", "16:13:00", "cancelled"),
    ],
)
def test_why_slurm_ends_a_job(state, end, preempted, at, why):
    shown = "".join(SHOWN.format(offset=k, state=state, end=end, preempted=preempted) for k in (0, 1))
    now = datetime.fromisoformat(f"2026-11-29T{at}").timestamp()
    assert why_terminated("4", now, answers(scontrol=Output(0, shown, ""))) == why


def test_a_job_is_put_into_the_queue_by_its_first_components_id():
    asked = []

    def runner(arguments, **_):
        asked.append(arguments)
        return Output(0, "", "")

    requeue("63", runner)
    assert asked == [["scontrol", "requeue", "63"]]
