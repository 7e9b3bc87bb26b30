"""What vLLM tells of the experts that tokens went to, all the way to the trainer's micro-batch. vLLM's runner for CPUs records
nothing, so that its outputs are made here: in its own type, with the shape and dtype that it documents."""

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, WeightVersionSpan

from prl.actor.replies import Answer, continue_answer, parse_answer
from prl.preprocess.assemble import Moment, build_step, prepare
from prl.preprocess.options import PreprocessOptions
from prl.sampler.generate import _as_arrays
from prl.sampler.options import SampleOptions
from prl.sampler.server import server_arguments
from prl.streams.files import Header
from prl.streams.reader import rows_in
from prl.streams.records import Group, Rollout, Turn
from prl.streams.rollouts import check_group, to_arrow
from prl.streams.rows import to_groups
from prl.streams.steps import read_step, write_step

LAYERS, EXPERTS = 2, 3


def experts(tokens: int, seed: int, dtype: str = "uint8") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (tokens, LAYERS, EXPERTS)).astype(dtype)


def reply(ids: list[int], routings: np.ndarray | None, finish: str = "stop") -> dict:
    """An answer as it comes over the wire."""
    logprobs = FlatLogprobs()
    for token in ids:
        logprobs.append({token: Logprob(-0.5)})
    output = CompletionOutput(
        index=0,
        text="",
        token_ids=ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        routed_experts=routings,
        finish_reason=finish,
        weight_versions=[WeightVersionSpan("0:0", 0, len(ids))],
    )
    return msgspec.json.decode(msgspec.json.encode(_as_arrays(output)))


def turn(prompt: list[int], answer: Answer) -> Turn:
    made = np.array(prompt, np.int32), answer.output_ids, answer.logprobs, answer.versions, answer.finish_reason
    return Turn(*made, 0, 0.0, 1.0, answer.routings)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_a_replys_routings_are_those_of_prompt_and_answer(dtype):
    given = experts(4, 1, dtype)
    found = parse_answer(reply([7, 8], given), 3).routings
    assert (found.dtype, found.tolist()) == (np.int16, given.tolist())
    assert "routings" not in reply([7, 8], None)
    assert parse_answer(reply([7, 8], None), 3).routings is None


@pytest.mark.parametrize(
    ("routings", "words"),
    [
        (experts(5, 1), "for 4 tokens"),
        (experts(4, 1)[:, 0], "for 4 tokens"),
        (experts(4, 1, "int64"), "as int64"),
        (np.full((4, 2, 2), 40000, np.uint16), "to expert 40000"),
    ],
)
def test_routings_that_do_not_fit_are_refused(routings, words):
    with pytest.raises(ValueError, match=words):
        parse_answer(reply([7, 8], routings), 3)


def test_routings_cut_short_on_the_wire_are_refused():
    answer = reply([7, 8], experts(4, 1))
    answer["routings"][-1] = answer["routings"][-1][:8]
    with pytest.raises(ValueError, match="reshape"):
        parse_answer(answer, 3)


def test_behind_an_abort_what_was_sampled_keeps_its_experts():
    before, behind = experts(4, 1), experts(7, 2)  # 3 prompt tokens and 2 of the answer; these and 3 more
    first = parse_answer(reply([7, 8], before, "abort"), 3)
    answer = continue_answer(first, parse_answer(reply([4, 5, 6], behind), 5))
    assert answer.routings.tolist() == [*before.tolist(), *behind[4:].tolist()]


def test_they_reach_the_trainers_micro_batch(tmp_path):
    """Two turns that make up one sequence, and a rollout of which nothing was recorded."""
    one, two = experts(3, 1), experts(7, 2)
    first = turn([1, 2], parse_answer(reply([3, 4], one), 2))
    second = turn([1, 2, 3, 4, 5], parse_answer(reply([6, 7, 8], two), 5))
    other = turn([1, 2], parse_answer(reply([9], None), 2))
    group = Group(0, "d", "", "d/1", 1, 0, (Rollout((first, second), 1.0), Rollout((other,), 0.0)))
    check_group(group)
    rows, _ = rows_in(pa.py_buffer(to_arrow([group], Header("rollouts", "run", 1, "actor-000", 0)).whole()), "here", "run")
    (found,) = to_groups(rows[0])
    options = PreprocessOptions(pack_tokens=16)
    step = build_step([prepare(found, options)], Moment(1, 0, {}, 2), options, 1)
    file = write_step(tmp_path, step.microbatches, step.facts, run="run", attempt=1, sequence=0)
    batch = read_step(file.path, file.bytes, file.checksum, run="run").microbatch(0)
    nothing = np.full((1, LAYERS, EXPERTS), -1).tolist()
    # Tokens 1, 2, 3 as the first answer was sampled; 4, which went nowhere then, to 7 as the second one was; not the last one.
    expected = {(1, 2, 3, 4, 5, 6, 7, 8): [*one.tolist(), *two[3:].tolist(), *nothing], (1, 2, 9): nothing * 3}
    assert len(batch.boundaries) == 3
    for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        assert batch.routings[start:end].tolist() == expected[tuple(batch.tokens[start:end].tolist())]


def test_vllm_is_told_to_record_only_where_it_is_wanted():
    flag = "--enable-return-routed-experts"
    assert flag in server_arguments("/models/m", "10.0.0.1", 8001, SampleOptions(record_routing=True), gpu=True)
    assert flag not in server_arguments("/models/m", "10.0.0.1", 8001, SampleOptions(), gpu=True)
