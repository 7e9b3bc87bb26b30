"""kill -9 of every process of a run at every operation by which it publishes or reads a stream, then resume: whatever a run
went through, nothing is lost and nothing doubled. Only the samplers are no real ones, but played from a recording."""

import shutil
from collections import defaultdict

import kill_points
import pytest
from faulty_runs import STEPS, FaultyRun, kill

from prl.runfolder.paths import RunFolder

QUICK = (  # one of each kind of process, the trainer's so that the next attempt finds a checkpoint that does not count
    ("preprocess-0", "rename streams/steps/", "middle"),
    ("actor-0", "write streams/rollouts/", "first"),
    ("orchestrator-0", "write checkpoints/step_N/.tmp ", "first"),
    ("trainer-0", "rename checkpoints/step_N/.tmp-trainer -> ", "middle"),
)
READERS, WRITERS = ("preprocess", "trainer"), ("actor", "preprocess", "trainer", "orchestrator")
BAD_WEATHER = (
    *(
        {"role": role, "point": r"(read|stat) streams/.*\.arrow.*", "fault": "late", "times": 2, "each": True}
        for role in READERS
    ),
    *({"role": role, "point": r"read streams/.*\.arrow.*", "fault": "ESTALE", "times": 1, "each": True} for role in READERS),
    *({"role": role, "point": "write .*", "fault": "short"} for role in WRITERS),
)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> FaultyRun:
    """A run of two steps that met no fault, with a checkpoint."""
    run = FaultyRun(RunFolder(tmp_path_factory.mktemp("finished") / "run"))
    run.start(steps=2)
    run.check_ended()
    return run


@pytest.fixture
def run(finished, tmp_path) -> FaultyRun:
    """A copy of it, to go on from."""
    shutil.copytree(finished.folder.path, tmp_path / "run", symlinks=True)
    return FaultyRun(RunFolder(tmp_path / "run"))


def die(run: FaultyRun, process: str, point: str, moment: str) -> None:
    """An attempt in which a process dies at a point."""
    last = run.checkpoint + STEPS
    run.resume(kill(process, point, kill_points.after_step(process, point, moment, last, STEPS)))
    assert [fault["point"] for fault in run.fired] == [point], f"{process} did not die at {point!r}\n{run.words()}"
    run.check()


@pytest.mark.deadline(600)
def test_a_death_of_each_kind_and_bad_weather_lose_and_double_nothing(finished, run):
    """And together these attempts pass every kill point there is."""
    points = defaultdict(set)

    def note(run: FaultyRun) -> None:
        for process, passed in run.points.items():
            points[process] |= passed

    note(finished)
    for process, start, moment in QUICK:
        point = next(p for p in kill_points.seen(points)[process] if p.startswith(start))
        die(run, process, point, moment)
        assert run.code != 0
        note(run)
    run.resume(*BAD_WEATHER)
    run.check_ended()
    note(run)
    faults = {(fault["process"], fault["point"].split()[0]) for fault in run.fired}
    assert {("preprocess-0", "read"), ("trainer-0", "read"), *((f"{role}-0", "write") for role in WRITERS)} <= faults
    assert not list(run.folder.path.glob("**/quarantine/*"))
    seen = kill_points.seen(points)
    if kill_points.is_written_anew():
        kill_points.write(seen)
    assert seen == kill_points.known(), "kill points have come or gone: write kill_points.json anew (see kill_points.py)"


CHAINS = [(process, moment) for process in kill_points.PROCESSES for moment in kill_points.MOMENTS]


@pytest.mark.slow
@pytest.mark.deadline(3600)
@pytest.mark.parametrize(("process", "moment"), CHAINS)
def test_a_death_at_every_point_loses_and_doubles_nothing(run, process, moment):
    """One attempt after another of the same run, each of which dies at another point; the last goes to the end."""
    for point in kill_points.known()[process]:
        if moment not in kill_points.moments(process, point):
            continue
        before = kill_points.before(process, point)
        if before is not None:
            die(run, *before, moment)
        die(run, process, point, moment)
    run.resume()
    run.check_ended()


@pytest.mark.slow
@pytest.mark.deadline(900)
@pytest.mark.parametrize("process", ["actor-0", "preprocess-0"])
def test_a_process_that_dies_at_every_point_in_turn_and_is_started_again_loses_and_doubles_nothing(run, process):
    """Within one attempt: each start dies at the next point, the last one lives."""
    points = kill_points.known()[process][::-1]  # the first are passed before it has joined, which the first start has to
    deaths = [{**kill(process, point), "start": start} for start, point in enumerate(points)]
    run.resume(*deaths, settings=[f"control.restarts={len(points)}"], more=20 * STEPS)  # metrics are written seldom
    assert [fault["point"] for fault in run.fired] == points, run.words()
    run.check_ended()


@pytest.mark.slow
@pytest.mark.deadline(900)
@pytest.mark.parametrize("fault", ["ENOSPC", "EDQUOT"])
def test_a_full_filesystem_ends_the_run_with_its_name_and_a_resume_goes_on(run, fault):
    for role, point in (
        ("actor", "write streams/rollouts/.*"),
        ("preprocess", "write streams/steps/.*"),
        ("orchestrator", "write streams/ledger/.*"),
        ("orchestrator", "create checkpoints/.*"),
        ("trainer", "write checkpoints/.*"),
        ("trainer", "write .tmp-export/.*"),
    ):
        run.resume({"role": role, "point": point, "fault": fault, "after_step": run.checkpoint + 1})
        assert run.code == 1
        assert run.exit["outcome"] == "failed"
        assert run.exit["role"] == role
        assert str(run.folder) in run.exit["cause"]
        assert {"ENOSPC": "space", "EDQUOT": "quota"}[fault] in run.exit["cause"].lower()
        assert run.exit["cause"] in run.output
        run.check()
    run.resume()
    run.check_ended()
