"""What a process has loaded when it starts to work is left alone by the collector of garbage."""

import pytest
from failing_child import reported


@pytest.mark.parametrize("kind", ["run_child", "run_threaded_child"])
def test_a_full_collection_of_a_child_does_not_go_through_its_modules(tmp_path, kind):
    counts = "f'{len(gc.get_objects())} of {gc.get_freeze_count() + len(gc.get_objects())}'"
    error, _ = reported(tmp_path, kind, f"RuntimeError({counts})")
    collected, loaded = map(int, error.removeprefix("RuntimeError: ").split(" of "))
    assert loaded > 10_000
    assert collected < loaded / 10
