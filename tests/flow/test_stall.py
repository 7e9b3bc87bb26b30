"""Whoever holds what comes first is waited for."""

from dataclasses import replace

import pytest

from prl.flow.stall import Queues, waited_for

QUIET = Queues(serving=2, updating=False, held={}, received=0, groups_per_step=4, step_waits=False)


@pytest.mark.parametrize(
    ("changes", "role", "words"),
    [
        ({"step_waits": True, "received": 9, "held": {0: 1}, "serving": 0}, "trainer", "step file"),
        ({"step_waits": True, "replays": True, "serving": 0}, "trainer", "step file"),
        ({"replays": True, "serving": 0}, "preprocess", "rollouts of another run"),
        ({"received": 4, "held": {0: 1}, "serving": 0}, "preprocess", "4 groups to build a step of 4"),
        ({"received": 3, "held": {0: 1}, "serving": 0}, "sampler", "none of which serves"),
        ({"received": 3, "held": {12: 1, 3: 2}, "updating": True}, "actor", "actor 3: 2, actor 12: 1"),
        ({"updating": True}, "trainer", "sending a version"),
        ({}, "actor", "ask for no groups"),
    ],
)
def test_the_role_that_has_to_act_first(changes, role, words):
    found, why = waited_for(replace(QUIET, **changes))
    assert found == role
    assert words in why
