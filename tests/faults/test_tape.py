"""The recording that stands for samplers: what it answers is what the actors' client takes."""

import json
from itertools import pairwise

import pytest
from replayed_sampler import TAPE, Tape

from prl.actor.replies import parse_reply
from prl.flow.versions import Version

PROMPTS = [
    request["token_ids"]
    for request in (json.loads(line)["request"] for line in TAPE.read_text().splitlines())
    if "token_ids" in request
]


@pytest.mark.parametrize("served", [Version(0, 0), Version(0, 1), Version(3, 7)])
@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[-1], [1, 1, 1, 1, 10]], ids=["recorded", "recorded last", "unknown"])
def test_answers_end_in_the_version_that_is_served(prompt, served):
    tape = Tape()
    for answer in parse_reply({"answers": [tape.answer(prompt, served) for _ in range(8)]}, 8, len(prompt)):
        assert answer.versions[-1].version == served
        assert answer.versions[-1].end == len(answer.output_ids) == len(answer.logprobs)
        assert all(one.version.step < other.version.step for one, other in pairwise(answer.versions))
        assert (answer.logprobs < 0).all()


def test_a_recorded_prompt_gets_its_recorded_answers_in_turn():
    lines = [json.loads(line) for line in TAPE.read_text().splitlines()]
    recorded = next(line for line in lines if line["route"] == "/prl/generate")
    tape = Tape()
    replayed = [tape.answer(recorded["request"]["token_ids"], Version(0, 5)) for _ in recorded["answer"]["answers"]]
    kept = ("token_ids", "logprobs", "finish_reason")
    assert [[a[k] for k in kept] for a in replayed] == [[a[k] for k in kept] for a in recorded["answer"]["answers"]]


def test_the_recording_is_of_a_whole_run():
    lines = [json.loads(line) for line in TAPE.read_text().splitlines()]
    assert all(line["status"] == 200 for line in lines)
    commits = [line for line in lines if line["route"] == "/prl/weights/commit"]
    assert [line["request"]["step"] for line in commits] == list(range(len(commits)))
    assert all(line["request"]["digest"] == line["answer"]["digest"] for line in commits)
    assert {line["route"] for line in lines} == {
        f"/prl/{r}" for r in ("generate", "weights/connect", "weights/receive", "weights/commit")
    }
