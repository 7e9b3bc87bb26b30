"""What can never start is refused before it is sent; what became of a job is asked of the queue, then of the accounting."""

import signal
from datetime import datetime
from functools import partial

import pytest

from prl.cluster.requests import requests
from prl.cluster.run import Output, ProgramError
from prl.cluster.slurm import (
    SlurmError,
    cancel_waiting,
    check_slurm,
    cluster_name,
    job_rows,
    job_state,
    jobs_in_queue,
    requeue,
    why_terminated,
)
from prl.cluster.split import make_split
from prl.config.load import replace
from prl.config.schema import Config

UP = Output(0, "Slurmctld(primary) at login is UP\n", "")


def answers(**by_program):
    """A runner that gives recorded output."""
    return lambda arguments, **_: by_program[arguments[0]]


def node(name, cpus=64, memory_mib=515000, resources="gpu:h100:4(S:0-1),nic:2", partition="main*", limit="infinite"):
    return f"{partition}|{name}|{cpus}|{memory_mib}|{resources}|{limit}\n"


def check(lines, nodes=3, **cluster):
    config = replace(Config(), cluster={"nodes": nodes, **cluster})
    check_slurm(requests(config, make_split(config)), answers(scontrol=UP, sinfo=Output(0, "".join(lines), "")))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cpus_per_node": 64, "memory_per_node_gib": 502.5, "gpus_per_node": 4}, None),
        (
            {"cpus_per_node": 65},
            "2 nodes that sample with 65 CPUs each, but the cluster has 1 of that kind, its nodes having at most ",
        ),
        (
            {"memory_per_node_gib": 503.0},
            "2 nodes that sample with 503 GiB of memory each, .*has 1 of that kind, its nodes having at most 1000 GiB",
        ),
        (
            {"gpus_per_node": 5, "cpus_per_node": 9},
            "1 node that trains with 9 CPUs and 5 GPUs each, .*has 0 of .*128 CPUs and 4 GPUs; .*cluster.partition",
        ),
    ],
)
def test_nodes_that_have_what_is_asked_of_each(asked, words):
    """Three nodes alike, though their lines name their GPUs otherwise, and a larger one without."""
    lines = [
        node("n1", resources="gpu:(null):4(S:0,1)"),
        node("n2", resources="nic:2,gpu:4(S:0-1)"),
        node("n3", resources="gpu:a:1,gpu:b:3"),
        node("big", 128, 1024000, "(null)"),
    ]
    if words is None:
        check(lines, **asked)
    else:
        with pytest.raises(SlurmError, match=words):
            check(lines, **asked)


def test_components_that_can_start_each_but_never_together_are_refused():
    """Each of two partitions has two nodes, one of which is the same."""
    lines = [node(name, partition="a*") for name in ("n1", "n2")] + [node(name, partition="b") for name in ("n2", "n3")]
    both = {"partition": "a", "sbatch_sample": {"partition": "b"}}
    check(lines, nodes=3, **both)
    with pytest.raises(SlurmError, match="asks for 4 Slurm nodes, but partition a and partition b have 3 that fit"):
        check(lines, nodes=4, train_nodes=2, **both)
    with pytest.raises(SlurmError, match=r"asks for 3 Slurm nodes, but partition a has 2 that fit; .*for ever"):
        check(lines, nodes=3, partition="a")
    with pytest.raises(SlurmError, match="asks for 4 nodes, but the cluster has 3; the job would wait for ever"):
        check(lines, nodes=4, mode="plain")
    check(lines, nodes=3, mode="plain")


def test_a_time_limit_that_the_partition_does_not_allow():
    lines = [node(name, limit="1:30:00") for name in ("n1", "n2", "n3")]
    check(lines, time_min=90)
    with pytest.raises(SlurmError, match=r"cluster\.time_min = 91: the cluster allows 90 minutes; lower it"):
        check(lines, time_min=91)
    check(lines, time_min=91, qos="long")  # a QOS may lift the limit


def test_partitions():
    lines = [node("n1", partition="cpu*"), *(node(name, partition="gpu") for name in ("n2", "n2", "n3", "n4"))]
    check(lines, partition="gpu")
    check(lines, nodes=4, partition="gpu,cpu")
    with pytest.raises(SlurmError, match=r"cluster\.partition .*= gqu: Slurm knows no nodes of it; it has cpu, gpu"):
        check(lines, partition="gqu")
    with pytest.raises(SlurmError, match="2 nodes that sample, but partition cpu has 1;"):
        check(lines, partition="cpu")
    check(lines)  # a site may choose the partition by other options
    with pytest.raises(SlurmError, match="1 node that trains, but the cluster has 0"):
        check([])


def test_of_several_partitions_a_component_goes_to_one():
    """Two nodes in each; n2 is in both."""
    lines = [node(name, partition="a*", limit="1:00:00") for name in ("n1", "n2")]
    lines += [node(name, partition="b", cpus=128) for name in ("n2", "n3")]
    check(lines, nodes=2, mode="plain", partition="a,b")
    with pytest.raises(SlurmError, match=r"asks for 3 nodes, but partition a has 2; .*\n.* but partition b has 2;"):
        check(lines, nodes=3, mode="plain", partition="a,b")
    check(lines, nodes=3, partition="a,b")  # one component in each
    with pytest.raises(SlurmError, match="asks for 4 Slurm nodes, but partition a,b has 3 that fit"):
        check(lines, nodes=4, train_nodes=2, partition="a,b")
    check(lines, nodes=2, mode="plain", partition="a,b", cpus_per_node=100, time_min=61)
    with pytest.raises(SlurmError, match="time_min = 61: partition a allows 60"):
        check(lines, nodes=2, mode="plain", partition="a", time_min=61)
    with pytest.raises(SlurmError, match=r"cluster\.partition .*= c: Slurm knows no nodes of it"):
        check(lines, nodes=2, partition="a,c")


def test_a_controller_that_does_not_answer_and_an_answer_that_cannot_be_read():
    config = replace(Config(), cluster={"nodes": 3})
    asked = requests(config, make_split(config))
    with pytest.raises(SlurmError, match=r"no Slurm controller answers .*is DOWN"):
        check_slurm(asked, answers(scontrol=Output(1, "Slurmctld(primary) at login is DOWN\n", "")))
    with pytest.raises(SlurmError, match=r"sinfo: a line of its answer cannot be read"):
        check(["main*|n1|many|1|(null)|1:00\n"])


GONE = Output(1, "", "slurm_load_jobs error: Invalid job id specified\n")
HEADER = "JobID|State|ExitCode|Start|End|NodeList\n"


def test_a_job_that_left_the_queue_is_looked_up_in_the_accounting():
    queue = "63+0|RUNNING|2026-11-29T16:13:27|n1|None\n63+1|RUNNING|2026-11-29T16:13:27|n[2-3]|None\n"
    assert job_state("63", answers(squeue=Output(0, queue, ""))) == "RUNNING"
    rows = HEADER + "63+0|FAILED|7:0|None|None|n1\n63+1|CANCELLED by 0|0:0|None|None|n[2-3]\n"
    assert job_state("63", answers(squeue=GONE, sacct=Output(0, rows, ""))) == "FAILED"
    assert [row.nodes for row in job_rows("63", answers(squeue=GONE, sacct=Output(0, rows, "")))] == ["n1", "n[2-3]"]
    assert job_state("63", answers(squeue=GONE, sacct=Output(1, "", "Slurm accounting storage is disabled\n"))) is None
    assert job_state("63", answers(squeue=GONE, sacct=Output(0, HEADER, ""))) is None


def test_which_of_several_jobs_are_in_the_queue():
    asked = []

    def queue(*lines):
        def runner(arguments, **_):
            asked.append(arguments[:4])
            return Output(0, "".join(lines), "")

        return runner

    rows = ["65+0|PENDING|N/A||Dependency\n", "65+1|PENDING|N/A||None\n", "63+0|RUNNING|N/A|n1|None\n"]
    ended = "61|COMPLETED|N/A|n1|None\n"
    assert jobs_in_queue(["61", "63", "65", "67"], queue(*rows, ended)) == ["63", "65"]
    assert asked == [["squeue", "-h", "-j", "61,63,65,67"]]
    assert jobs_in_queue([], queue(*rows)) == []
    assert len(asked) == 1
    assert jobs_in_queue(["61"], answers(squeue=GONE)) == []
    with pytest.raises(ProgramError, match="Unable to contact"):
        jobs_in_queue(["61"], answers(squeue=Output(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")))


def test_the_clusters_name():
    shown = "Configuration data as of 2026-11-29T16:13:27\nClusterName             = lab7\nCompleteWait            = 0 sec\n"
    assert cluster_name(answers(scontrol=Output(0, shown, ""))) == "lab7"
    assert cluster_name(answers(scontrol=Output(0, "nothing\n", ""))) is None


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        ({"squeue": GONE, "sacct": Output(1, "", "sacct: error: Connection refused")}, r"sacct: .*Connection refused"),
        ({"squeue": Output(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")}, "Unable to contact"),
        ({"squeue": Output(0, "63|PURGED|N/A|n1|None\n", "")}, "state 'PURGED', which prl does not know"),
    ],
)
def test_a_state_that_nobody_can_tell(programs, words):
    with pytest.raises(ProgramError, match=words):
        job_state("63", answers(**programs))


# As Slurm 22.05 prints the two components of a heterogeneous job, shortened.
SHOWN = (
    "JobId=4 HetJobId=4 HetJobOffset={offset} JobName=het1 JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} "
    "RunTime=00:04:50 TimeLimit=00:05:00 TimeMin=N/A StartTime=2026-11-29T16:11:29 EndTime={end} Deadline=N/A "
    "PreemptEligibleTime=2026-11-29T16:11:29 PreemptTime={preempted} SuspendTime=None Command=/home/u/my job=1/x\n"
)
LIMIT = "2026-11-29T16:16:29"


@pytest.mark.parametrize(
    ("states", "reason", "restarts", "end", "preempted", "at", "why"),
    [
        (("RUNNING",) * 2, "None", 1, LIMIT, "2026-11-29T16:13:00", "16:13:00", "preempted"),
        (("PREEMPTED",) * 2, "None", 1, "2026-11-29T16:13:00", "2026-11-29T16:13:00", "16:13:00", "preempted"),
        (("TIMEOUT",) * 2, "None", 1, "2026-11-29T16:16:40", "None", "16:16:40", "time limit"),
        (("COMPLETING",) * 2, "TimeLimit", 1, "2026-11-29T16:14:40", "None", "16:14:40", "time limit"),
        (("RUNNING",) * 2, "None", 1, LIMIT, "None", "16:16:29", "time limit"),
        (("RUNNING",) * 2, "None", 1, LIMIT, "None", "16:13:00", None),  # scancel --signal=TERM, or by srun
        (("CANCELLED",) * 2, "None", 1, "2026-11-29T16:13:00", "None", "16:13:00", "cancelled"),
        (("COMPLETING",) * 2, "None", 1, "2026-11-29T16:13:00", "None", "16:13:00", "cancelled"),
        (("RUNNING", "COMPLETING"), "None", 1, LIMIT, "None", "16:13:00", "cancelled"),  # one component alone
        (("RUNNING",) * 2, "None", 1, "Unknown", "None", "16:13:00", None),
        (("COMPLETING",) * 2, "None", 2, LIMIT, "None", "16:13:00", "requeued"),
        (("COMPLETING", "NODE_FAIL"), "NodeDown", 1, "2026-11-29T16:13:00", "None", "16:13:00", "node failure"),
        (("COMPLETING",) * 2, "NodeDown", 2, "2026-11-29T16:13:00", "None", "16:13:00", "node failure"),
    ],
)
def test_why_slurm_ends_a_job(states, reason, restarts, end, preempted, at, why):
    """A job that Slurm had put into the queue again once."""
    shown = "".join(
        SHOWN.format(offset=k, state=state, reason=reason, restarts=restarts, end=end, preempted=preempted)
        for k, state in enumerate(states)
    )
    now = datetime.fromisoformat(f"2026-11-29T{at}").timestamp()
    assert why_terminated("4", now, 1, answers(scontrol=Output(0, shown, ""))) == why


def test_an_end_of_a_job_in_an_unknown_state_is_not_taken_for_another():
    shown = SHOWN.format(offset=0, state="FROZEN", reason="None", restarts=0, end=LIMIT, preempted="None")
    with pytest.raises(ProgramError, match="state 'FROZEN', which prl does not know"):
        why_terminated("4", 0.0, 0, answers(scontrol=Output(0, shown, "")))


@pytest.mark.parametrize(
    ("tell", "said"),
    [(partial(requeue, "63"), "scontrol requeue 63"), (partial(cancel_waiting, ["64", "65"]), "scancel --state=PENDING 65 64")],
)
def test_what_a_job_tells_slurm_at_its_end_does_not_end_with_it(tell, said):
    told = []

    def runner(arguments, **_):
        told.append((" ".join(arguments), signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        return Output(0, "", "")

    tell(runner)
    assert told == [(said, True)]
