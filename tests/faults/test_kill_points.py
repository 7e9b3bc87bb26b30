"""kill -9 at every operation of everything that publishes. The points are those that the code passes when it is recorded here,
so that a new operation is a new test."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from fault_layer import WRITES, FaultLayer, Operation
from publishing import SCENES, Scene, make_run


def record(scene: Scene) -> list[Operation]:
    """Everything that the scene's publishing does to the folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder))
        done: list[Operation] = []
        with FaultLayer(run.path, done.append):
            state = scene.before(run)
            done.clear()
            scene.publish(run, state)
    return [operation for operation in done if operation.kind in WRITES]


POINTS = {name: record(scene) for name, scene in SCENES.items()}


def killed_at(scene: Scene, folder: Path, number: int) -> int:
    """The signal of which a process dies that publishes and is killed at its operation `number`."""
    left: list[str] | None = None  # faults of the operations to come; None: not yet

    def plan(operation: Operation) -> str | None:
        return left.pop(0) if left and operation.kind in WRITES else None

    process = os.fork()
    if process == 0:
        try:
            run = make_run(folder)
            with FaultLayer(folder, plan):
                state = scene.before(run)
                left = [*[""] * number, "kill"]
                scene.publish(run, state)
        finally:
            os._exit(1)
    return os.WTERMSIG(os.waitpid(process, 0)[1])


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, id=f"{name}: {number}, {operation.point}")
        for name, operations in POINTS.items()
        for number, operation in enumerate(operations)
    ],
)
def test_a_kill_leaves_all_or_nothing_and_the_next_attempt_goes_on(tmp_path, name, number):
    scene = SCENES[name]
    assert killed_at(scene, tmp_path, number) == signal.SIGKILL
    run = make_run(tmp_path)
    found = scene.found(run)
    assert found in scene.whole
    scene.again(run)
    assert scene.found(run) in scene.whole_again


@pytest.mark.parametrize("name", SCENES)
def test_a_write_that_takes_only_half_is_gone_on_with(tmp_path, name):
    """As a system may answer that has little room left."""
    scene, run = SCENES[name], make_run(tmp_path)
    shorts = []

    def plan(operation: Operation) -> str | None:
        if operation.kind != "write":
            return None
        shorts.append(operation)
        return "short"

    with FaultLayer(tmp_path, plan):
        state = scene.before(run)
        shorts.clear()
        scene.publish(run, state)
    assert scene.found(run) == scene.whole[-1]
    assert len(shorts) > 1


def test_the_recorded_operations_are_those_of_a_durable_publication():
    """What is named is durable first: data before the name, the name before anyone is told."""
    for name in ("rollout writer", "step writer", "manifest"):
        kinds = [operation.kind for operation in POINTS[name]]
        assert kinds == ["create", "write", "fsync", "rename", "fsync"], name
    assert [operation.kind for operation in POINTS["ledger"]] == ["write", "fsync"] * 2
