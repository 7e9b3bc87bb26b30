"""What Slurm prints is read as what it means: its releases' and sites' ways of writing, on recordings where there are any."""

import csv
import io
import json
import re
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.cluster.slurm_output import (
    ENDED,
    RUNNING,
    STATES,
    WAITING,
    Expected,
    JobRow,
    NodeRow,
    SlurmOutputError,
    fold_states,
    has_ended,
    parse_accounting,
    parse_expected,
    parse_memory_mib,
    parse_minutes,
    parse_nodes,
    parse_queue,
    parse_state,
    parse_submitted,
)

RECORDED = Path(__file__).parents[2] / "../shared/data/cluster_outputs"  # beside the checkout, if there are any
recorded = pytest.mark.skipif(not RECORDED.is_dir(), reason=f"no recordings of Slurm's output in {RECORDED}")


def text_of(name):
    return (RECORDED / "slurm_text" / name).read_text()


def blocks(name):
    """(command, what it printed, exit code) of a recording of several commands."""
    for block in re.split(r"^### ", text_of(name), flags=re.MULTILINE)[1:]:
        command, _, rest = block.partition("\n")
        printed, _, code = rest.partition("--- exit=")
        yield command, printed, int(code.split()[0]) if code else 0


def test_every_state_is_either_waiting_or_running_or_has_ended():
    assert len(set(STATES)) == len(STATES) == len(RUNNING) + len(WAITING) + len(ENDED)
    assert [state for state in STATES if has_ended(state)] == list(ENDED)


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("RUNNING", "RUNNING"),
        ("CANCELLED by 0", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("OUT_OF_ME+", "OUT_OF_MEMORY"),
        ("NODE_FAIL ", "NODE_FAIL"),
        ("REQUEUED", "REQUEUED"),
        ("PREEMPTED+", "PREEMPTED"),
    ],
)
def test_a_state_with_something_behind_it_or_cut_off(printed, state):
    assert parse_state(printed) == state


@pytest.mark.parametrize("printed", ["", "+", "GONE", "RE+", "running", "OUT_OF_ME", "C+"])
def test_a_state_that_is_not_known_is_an_error_that_quotes_it(printed):
    with pytest.raises(SlurmOutputError, match=re.escape(f"the job's state {printed!r}, which prl does not know")):
        parse_state(printed)


@given(st.sampled_from(STATES), st.integers(min_value=6))
def test_no_state_is_taken_for_another_however_it_is_cut_off(state, length):
    cut = state if length >= len(state) else f"{state[:length]}+"
    try:
        assert parse_state(cut) == state or cut.removesuffix("+") in STATES
    except SlurmOutputError:
        assert sum(other.startswith(state[:length]) for other in STATES) > 1


@pytest.mark.parametrize(
    ("states", "folded"),
    [
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["COMPLETED", "RUNNING"], "RUNNING"),
        (["PENDING", "CONFIGURING"], "CONFIGURING"),
        (["FAILED", "NODE_FAIL"], "NODE_FAIL"),
        (["CANCELLED by 0", "FAILED"], "FAILED"),
        (["CANCELLED+", "COMPLETED"], "CANCELLED"),
        (["TIMEOUT", "OUT_OF_ME+"], "OUT_OF_MEMORY"),
        (["COMPLETED", "REQUEUE_HOLD"], "REQUEUE_HOLD"),
    ],
)
def test_one_state_for_all_components(states, folded):
    assert fold_states(states) == fold_states(states[::-1]) == folded


def test_rows_of_the_queue():
    text = (
        "63+0|RUNNING|2026-11-29T16:13:27|n1|None\n63+1|PENDING|N/A||(ReqNodeNotAvail, UnavailableNodes:cs[100,101]|x)\n"
        "6_[3-5%2]|PENDING|2026-11-29T16:21:32||JobArrayTaskLimit\n"
    )
    assert parse_queue(text) == [
        JobRow("63", 0, "RUNNING", datetime(2026, 11, 29, 16, 13, 27), "n1"),
        JobRow("63", 1, "PENDING", None, "", "(ReqNodeNotAvail, UnavailableNodes:cs[100,101]|x)"),
        JobRow("6_[3-5%2]", 0, "PENDING", datetime(2026, 11, 29, 16, 21, 32), "", "JobArrayTaskLimit"),
    ]
    assert parse_queue("") == []


@pytest.mark.parametrize("text", ["63|RUNNING\n", "J|RUNNING|N/A|n1|None\n", "63|RUNNING|5 minutes ago|n1|None\n"])
def test_rows_of_the_queue_that_cannot_be_read(text):
    with pytest.raises(SlurmOutputError, match=r"cannot be read: '63\|RUNNING'|'J' is no job id|'5 minutes ago' is no time"):
        parse_queue(text)


def test_rows_of_the_accounting():
    """Of a job that was requeued the last row counts, which is that of its present run; steps are no jobs."""
    text = (
        "JobID|State|ExitCode|Start|End|NodeList\n59|PREEMPTED|0:0|2026-11-29T16:13:02|2026-11-29T16:13:04|n[1-4]\n"
        "59.batch|CANCELLED|0:15|2026-11-29T16:13:02|2026-11-29T16:13:04|n1\n"
        "59|CANCELLED by 0|0:0|None|2026-11-29T16:13:14|None assigned\n103|RUNNING|0:0|2026-11-29T16:13:02|Unknown|n1\n"
    )
    assert parse_accounting(text) == [
        JobRow("59", 0, "CANCELLED", None, "", exit_code="0:0"),
        JobRow("103", 0, "RUNNING", datetime(2026, 11, 29, 16, 13, 2), "n1", exit_code="0:0"),
    ]
    assert parse_accounting("") == parse_accounting("JobID|State|ExitCode|Start|End|NodeList\n") == []
    with pytest.raises(SlurmOutputError, match="has no 'ExitCode'"):
        parse_accounting("JobID|State|Start|NodeList\n1|COMPLETED|None|n1\n")


def test_nodes_of_partitions():
    text = (
        "main*|n1|64|515000|gpu:h100:4(S:0-1),nic:2|infinite\nmain*|n2|64+|515000+|gpu:(null):4(S:0,1)|infinite\n"
        "short|n1|64|515000|gpu:a:1,gpu:b:3|5:00\ncpu|n9|128|1024000|(null)|1-12:00:00\n"
    )
    assert parse_nodes(text) == [
        NodeRow("main", "n1", 64, 515000, 4, None),
        NodeRow("main", "n2", 64, 515000, 4, None),
        NodeRow("short", "n1", 64, 515000, 4, 5),
        NodeRow("cpu", "n9", 128, 1024000, 0, 2160),
    ]
    with pytest.raises(SlurmOutputError, match=r"sinfo: a line of its answer cannot be read: 'p\|n1\|many"):
        parse_nodes("p|n1|many|1|(null)|1:00\n")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90), ("5:00", 5), ("5:01", 6), ("1:30:00", 90), ("1:30:30", 91), ("1-12", 2160), ("1-12:30", 2190),
        ("2-00:00:00", 2880), ("1-99:00", 7380), ("1-99", 7380), ("1-00:99", 1539), ("1-23:59:99", 2881), ("99:99", 101),
        ("99:99:99", 6041), ("1:2", 2), ("0-30", 1800), ("0", 0), ("infinite", None), ("UNLIMITED", None),
    ],
)  # fmt: skip
def test_time_limits(text, minutes):
    """Numbers above 59 and 23 are those that Slurm 22.05 makes of them, too: `sbatch --time`, then `scontrol show job`."""
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "an hour", "1:2:3:4", "1-2:3:4:5", ":30", "1-", "1-1-1", " 5", "-5", "1.5", "2h"])
def test_what_is_no_time_limit(text):
    with pytest.raises(SlurmOutputError, match=r"is no time limit; write minutes, or e\.g\. 12:00:00"):
        parse_minutes(text)


def test_amounts_of_memory():
    assert [parse_memory_mib(text) for text in ("1000", "1000M", "200G", "1t", "2048K", "0")] == [
        *(1000, 1000, 204800, 1048576, 2, 0)
    ]
    with pytest.raises(SlurmOutputError, match="'much' is no amount of memory"):
        parse_memory_mib("much")


def test_the_job_that_sbatch_names():
    assert parse_submitted("Submitted batch job 55 on cluster lab7\n") == "55"
    banner = "-----\nWelcome. Your last job 12 used 3 SUs.\n--> Submitted batch job pending\nSubmitted batch job 4711\n"
    assert parse_submitted(banner) == "4711"
    with pytest.raises(SlurmOutputError, match="names no job: 'job 12 is held'; see squeue --me"):
        parse_submitted("job 12 is held\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "sbatch: Job 19 to start at 2026-11-29T16:11:36 using 2 processors on nodes n[1-2] in partition short",
            Expected(datetime(2026, 11, 29, 16, 11, 36), "n[1-2]", ""),
        ),
        (  # of a heterogeneous job
            "sbatch: Job 20 to start at 2154-07-05T01:24:36 using 3 processors on n[1-2]",
            Expected(datetime(2154, 7, 5, 1, 24, 36), "n[1-2]", ""),
        ),
        (  # as 24.x writes it
            "sbatch: Job 9 to start at 2026-10-04T19:02:30 a using 16 processors on nodes d1011 in partition gpu-short",
            Expected(datetime(2026, 10, 4, 19, 2, 30), "d1011", ""),
        ),
        (
            "sbatch: error: QOSMaxGRESPerUser\nallocation failure: Job violates accounting/QOS policy (job submit limit)",
            Expected(None, "", "QOSMaxGRESPerUser; Job violates accounting/QOS policy (job submit limit)"),
        ),
        ("", Expected(None, "", "sbatch gave no answer")),
    ],
)
def test_an_expected_start(text, expected):
    assert parse_expected(text) == expected


@recorded
def test_recorded_states_are_known():
    names = text_of("job_state_names.txt").split()
    assert len(names) > 20
    assert set(names) <= set(STATES)
    found = set()
    for path in (RECORDED / "slurm_json").glob("*.json"):
        jobs = json.loads(path.read_text()).get("jobs", [])
        for job in jobs:
            state = job["state"]["current"] if "state" in job else job.get("job_state", [])
            found |= {state} if isinstance(state, str) else set(state)
    assert len(found) > 5
    assert {parse_state(state) for state in found} == found


@recorded
def test_recorded_queues():
    rows = parse_queue(
        "\n".join(
            "|".join((cells[0], cells[3], cells[11], cells[6], cells[4]))
            for cells in (
                line.split("|") for line in text_of("squeue_o_pipe_r__i_F_K_T_r_R_N_D_l_L_M_S_e_b_P_u_a_q.txt").splitlines()
            )
        )
    )
    assert len(rows) == 17
    by_job = {(row.job_id, row.component): row for row in rows}
    assert (by_job["4", 1].nodes, by_job["4", 1].state) == ("n[2-3]", "RUNNING")
    assert (by_job["15", 0].reason, by_job["15", 0].start) == ("Resources", datetime(2026, 11, 29, 16, 21, 32))
    assert by_job["12", 0].start is None


@recorded
@pytest.mark.parametrize("name", ["sacct_parsable2.txt", "sacct_het_running.txt", "sacct_D_X_ALL_fields.txt"])
def test_recorded_accounting(name):
    text = text_of(name)
    rows = {(row.job_id, row.component): row for row in parse_accounting(text)}
    read = list(csv.DictReader(io.StringIO(text), delimiter="|", quoting=csv.QUOTE_NONE))
    jobs = [row for row in read if "." not in row["JobID"]]
    assert len(rows) == len({row["JobID"] for row in jobs})
    for (job, component), row in rows.items():
        last = [cells for cells in jobs if cells["JobID"] in (f"{job}+{component}", job)][-1]
        assert last["State"].startswith(row.state)
        assert (row.nodes or "None assigned") == last["NodeList"]
    if name == "sacct_parsable2.txt":
        assert fold_states([rows["63", k].state for k in (0, 1)]) == "NODE_FAIL"


@recorded
def test_recorded_estimates():
    refused = expected = 0
    for _command, printed, code in blocks("sbatch_test_only_forms.txt"):
        found = parse_expected(printed)
        assert (found.start is not None) == (code == 0) == (not found.refusal)
        assert not re.search("^(sbatch|allocation failure)", found.refusal)
        refused, expected = refused + (code != 0), expected + (code == 0)
    assert (refused, expected) == (21, 9)
    others = [parse_expected(line) for line in text_of("sbatch_test_only__other_sites.txt").splitlines()]
    assert [found.nodes for found in others[:3]] == ["node-x[02,15-16]", "rhea[499-500]", "d1011"]
    assert all(found.refusal for found in others[3:])


@recorded
def test_recorded_submissions():
    ids = {}
    for command, printed, code in blocks("sbatch_errors_and_client_messages.txt"):
        if not command.startswith("sbatch") or "parsable" in command:
            continue
        if "Submitted" in printed:
            ids[command] = parse_submitted(printed)
        elif code:
            with pytest.raises(SlurmOutputError):
                parse_submitted(printed)
    assert (ids["sbatch -M lab7"], ids["sbatch -N9 -t 5"], len(ids) > 8) == ("55", "36", True)


@recorded
def test_recorded_time_limits():
    limits = {
        line.split("|")[0].rstrip("*"): parse_minutes(line.split("|")[2]) for line in text_of("sinfo_o_pipe.txt").splitlines()
    }
    assert limits == {"main": None, "short": 5, "urgent": 60, "kill": 60, "closed": 60, "priv": 60}
