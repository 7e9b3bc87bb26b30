"""How ranks share a model: what is refused, and what a rank is said to hold."""

import re
from dataclasses import replace

import pytest
from real_sizes import QWEN_7B, QWEN_30B, SIZES

from prl.config.hf_config import model_config
from prl.config.layout import context_problems, layout_of, layout_problems
from prl.config.memory import (
    describe_memory,
    describe_weights,
    fullest_rank,
    gathered_bytes,
    kept_bytes,
    rank_memory,
    rank_parameters,
    saved_bytes,
    saved_on_a_node,
)
from prl.config.schema import Config
from prl.sampler.options import SampleOptions
from prl.trainer.options import TrainOptions
from prl.weights.options import WeightsOptions

NARROW_HEADS = model_config(SIZES | {"model_type": "qwen3", "head_dim": 64})
WINDOWED = model_config(SIZES | {"model_type": "mistral", "sliding_window": 4096})
GIB = 2**30


def train(**options):
    return TrainOptions(**options)


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({"pipeline_parallel": 3}, QWEN_7B, "train.pipeline_parallel = 3: .*28 layers; .*one of 1, 2, 4, 7, 14, 28"),
        ({"pipeline_parallel": 4, "virtual_pipeline": 2}, QWEN_7B, "virtual_pipeline = 2 does not divide the model's 28"),
        ({"virtual_pipeline": 2}, QWEN_7B, "train.virtual_pipeline = 2: needs train.pipeline_parallel above 1"),
        ({"sequence_parallel": True}, QWEN_7B, "needs train.tensor_parallel above 1"),
        ({"expert_parallel": 2}, QWEN_7B, "train.expert_parallel = 2: the model has no experts"),
        ({"lora_rank": 3585}, QWEN_7B, "train.lora_rank = 3585: is above the width .*, 3584,"),
        ({"lora_rank": 99999}, NARROW_HEADS, "train.lora_rank = 99999: is above the width .*, 1792,"),
        ({"lora_rank": 4}, QWEN_30B, "train.lora_rank = 4: adapters are for models without experts"),
        ({"expert_parallel": 3}, QWEN_30B, "train.expert_parallel = 3: does not divide the model's 128 experts"),
        ({"tensor_parallel": 2}, QWEN_30B, "train.tensor_parallel = 2: .*needs train.sequence_parallel: true"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(options, model, words):
    (problem,) = layout_problems(train(**options), model)
    assert re.search(words, problem)


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"tensor_parallel": 4, "pipeline_parallel": 7, "virtual_pipeline": 2, "sequence_parallel": True}, QWEN_7B),
        ({"tensor_parallel": 2, "pipeline_parallel": 4, "expert_parallel": 8, "sequence_parallel": True}, QWEN_30B),
    ],
)
def test_what_fits_is_not_refused(options, model):
    assert list(layout_problems(train(**options), model)) == []


@pytest.mark.parametrize(
    ("options", "model", "gpus", "words"),
    [
        ({}, None, 0, "needs accelerators; set cluster.gpus_per_node"),
        ({}, QWEN_7B, 8, "set train.dtype: bfloat16"),
        ({"dtype": "bfloat16", "lora_rank": 4}, QWEN_7B, 8, "set train.lora_rank: 0"),
        ({"dtype": "bfloat16"}, WINDOWED, 8, "knows no window"),
    ],
)
def test_what_keeps_ranks_from_sharing_sequences(options, model, gpus, words):
    (problem,) = context_problems(train(context_parallel=2, **options), model, gpus)
    assert re.search(f"train.context_parallel = 2: .*{words}", problem)


def test_sequences_are_shared_over_accelerators():
    options = {"context_parallel": 4, "tensor_parallel": 2, "dtype": "bfloat16"}
    assert list(context_problems(train(**options), QWEN_7B, 8)) == []
    assert list(context_problems(train(), WINDOWED, 0)) == []  # where no sequence is shared
    layout = layout_of(train(**options))
    assert (layout.unit, layout.model_ranks) == (8, 8)
    assert layout.describe(16) == "tensor parallel 2 x context parallel 4 x data parallel 2"


@pytest.mark.parametrize(
    ("widths", "unit"),
    [((1, 1, 1), 1), ((2, 1, 1), 2), ((2, 3, 1), 6), ((2, 1, 4), 4), ((4, 1, 2), 4), ((2, 2, 3), 12)],
)
def test_ranks_come_in_units(widths, unit):
    tensor, pipeline, expert = widths
    layout = layout_of(train(tensor_parallel=tensor, pipeline_parallel=pipeline, expert_parallel=expert))
    assert layout.unit == unit


def test_a_layout_in_words():
    options = {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 3, "expert_parallel": 4}
    words = "tensor parallel 2 x pipeline parallel 2 in 3 turns x data parallel 4, expert parallel 4"
    assert layout_of(train(**options)).describe(16) == words
    assert layout_of(train()).describe(3) == "tensor parallel 1 x data parallel 3"


@pytest.mark.parametrize(("model", "count"), [(QWEN_7B, 7_615_616_512), (QWEN_30B, 30_532_122_624)])
@pytest.mark.parametrize("widths", [(1, 1, 1), (4, 1, 1), (1, 4, 1), (4, 4, 1), (1, 1, 8)])
def test_ranks_hold_the_model_together(model, count, widths):
    """The counts are those of the published weights. What tensor-parallel ranks all hold is counted on each."""
    tensor, pipeline, expert = widths
    layout = layout_of(train(tensor_parallel=tensor, pipeline_parallel=pipeline, expert_parallel=expert))
    held = [rank_parameters(model, layout, stage) for stage in range(pipeline)]
    whole = (2 * model.layers + 1) * model.hidden_size
    if model.experts:
        whole += model.layers * (2 * model.head_dim + model.experts * model.hidden_size)
    assert sum(stage.shared for stage in held) * tensor - (tensor - 1) * whole + sum(s.experts for s in held) * expert == count


def test_a_tied_head_is_a_copy_of_its_own_on_the_last_stage():
    tied = model_config(SIZES | {"tie_word_embeddings": True})
    vocabulary = tied.vocabulary * tied.hidden_size
    stages = [rank_parameters(tied, layout_of(train(pipeline_parallel=2)), stage).all for stage in (0, 1)]
    one = rank_parameters(tied, layout_of(train()), 0).all
    assert sum(stages) == one + vocabulary


def test_bytes_of_a_parameter():
    """bfloat16: weight 2, gradient 4, float32 copy and two moments 12; float32: 4, 4 and 8; with the distributed optimizer each
    of four ranks has a fourth of the state."""
    count = rank_parameters(QWEN_7B, layout_of(train()), 0).all
    half = rank_memory(QWEN_7B, train(dtype="bfloat16"), 4, 1024, 0)
    assert (half.parameters, half.gradients, half.optimizer, half.frozen_copies) == (2 * count, 4 * count, 12 * count, 0)
    full = rank_memory(QWEN_7B, train(reference="initial"), 4, 1024, 0)
    assert (full.parameters, full.gradients, full.optimizer, full.frozen_copies) == (4 * count, 4 * count, 8 * count, 4 * count)
    shared = rank_memory(QWEN_7B, train(dtype="bfloat16", distributed_optimizer=True), 4, 1024, 0)
    assert shared.optimizer == 3 * count
    options = train(dtype="bfloat16", distributed_optimizer=True, optimizer_offload=True)
    offloaded = rank_memory(QWEN_7B, options, 4, 1024, 0)  # with the gradient on the host
    assert (offloaded.optimizer, offloaded.on_the_host, offloaded.gradients) == (0, 4 * count, 4 * count)
    assert offloaded.total == shared.total - 3 * count
    assert "on the host 28.4 GiB" in describe_memory(QWEN_7B, options, 4, 1024)


def test_experts_are_copied_on_fewer_ranks_than_the_rest():
    options = train(dtype="bfloat16", distributed_optimizer=True, expert_parallel=4)
    held = rank_parameters(QWEN_30B, layout_of(options), 0)
    assert held.experts == 48 * 32 * 3 * 2048 * 768
    found = rank_memory(QWEN_30B, options, 8, 1024, 0).optimizer
    assert found == 12 * (-(-held.shared // 8) + held.experts // 2)


def test_what_saves_memory_does():
    def total(**options):
        return fullest_rank(QWEN_7B, train(dtype="bfloat16", **options), 8, 16384)[1].total

    plain = total()
    assert plain > 18 * 7.6e9  # weights, gradients and state alone
    smaller = [
        {"recompute": "selective"},
        {"recompute": "full"},
        {"distributed_optimizer": True},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
    ]
    assert all(total(**options) < plain for options in smaller)
    assert total(recompute="full") < total(recompute="selective")
    assert total(tensor_parallel=2, sequence_parallel=True) < total(tensor_parallel=2)
    assert total(pipeline_parallel=2, virtual_pipeline=2) > total(pipeline_parallel=2)


def test_ranks_that_share_sequences_have_all_weights_and_their_part_of_the_tokens():
    options = {"dtype": "bfloat16", "distributed_optimizer": True}
    one, two = (rank_memory(QWEN_7B, train(context_parallel=n, **options), 8, 10001, 0) for n in (1, 2))
    half = rank_memory(QWEN_7B, train(**options), 8, 5001, 0)
    assert two == replace(one, activations=half.activations, logits=half.logits)
    assert two.activations < 0.51 * one.activations
    config = Config(train=train(context_parallel=2, dtype="bfloat16"), sample=SampleOptions(dtype="bfloat16"))
    assert gathered_bytes(config, QWEN_7B) == 0


def test_adapters_have_gradients_and_an_optimizer_alone():
    queries_keys_values, output, up, down = 3584 + 4608, 2 * 3584, 3584 + 2 * 18944, 18944 + 3584
    adapters = 28 * 16 * (queries_keys_values + output + up + down)
    whole = rank_memory(QWEN_7B, train(recompute="full"), 1, 1000, 0)
    memory = rank_memory(QWEN_7B, train(recompute="full", lora_rank=16), 1, 1000, 0)
    assert memory.gradients == 4 * adapters
    assert memory.optimizer == 8 * adapters
    assert memory.parameters == whole.parameters + 4 * adapters
    assert memory.activations == whole.activations
    assert rank_memory(QWEN_7B, train(lora_rank=16), 1, 1000, 0).activations > whole.parameters


def test_the_first_stage_of_a_pipeline_holds_as_many_activations_as_one_rank_would():
    alone = rank_memory(QWEN_7B, train(dtype="bfloat16"), 1, 4096, 0).activations
    first, last = (rank_memory(QWEN_7B, train(dtype="bfloat16", pipeline_parallel=2), 2, 4096, stage) for stage in (0, 1))
    head = 2 * 4096 * QWEN_7B.hidden_size
    assert first.activations == alone - head
    assert last.activations == first.activations // 2 + head
    assert first.logits == 0
    assert last.logits == 3 * 256 * 2**20


def test_the_whole_model_is_gathered_for_the_samplers_between_steps():
    """On one rank of the first stage, when the activations are gone; a rank that has all of it sends its own parameters."""
    options = {"dtype": "bfloat16", "recompute": "full", "tensor_parallel": 4}
    count = 7_615_616_512
    config = Config(train=train(**options), sample=SampleOptions(dtype="bfloat16"))
    assert gathered_bytes(config, QWEN_7B) == 2 * count
    assert gathered_bytes(Config(train=train(), sample=SampleOptions(dtype="float32")), QWEN_7B) == 0
    assert gathered_bytes(Config(train=train(), sample=SampleOptions(dtype="bfloat16")), QWEN_7B) == 2 * count
    without, sending = (rank_memory(QWEN_7B, config.train, 4, 1024, 0, sent_bytes=sent) for sent in (0, 2 * count))
    assert sending.total == without.between_steps + 2 * count > without.total
    staged = train(**options, pipeline_parallel=2)
    assert rank_memory(QWEN_7B, staged, 8, 1024, 1, sent_bytes=2 * count).sending == 0


def test_the_first_of_the_ranks_that_hold_the_same_copies_it_for_a_checkpoint():
    """Weight 2, float32 copy and two moments 12 bytes a parameter. Of 16 ranks as 2 stages of 4 tensor-parallel ones, 0 to 3
    are the first of one stage and 8 to 11 of the other."""
    options = train(dtype="bfloat16", tensor_parallel=4, pipeline_parallel=2)
    saved = [saved_bytes(QWEN_7B, options, 16, rank) for rank in range(16)]
    stages = [14 * rank_parameters(QWEN_7B, layout_of(options), stage).all for stage in (0, 1)]
    assert saved == [stages[0]] * 4 + [0] * 4 + [stages[1]] * 4 + [0] * 4
    assert saved_on_a_node(QWEN_7B, options, 16, 8) == 4 * max(stages)
    assert saved_on_a_node(QWEN_7B, options, 16, 2) == 2 * max(stages)
    shared = train(dtype="bfloat16", tensor_parallel=2, context_parallel=2)  # two ranks have all of it, the others the same
    assert [saved_bytes(QWEN_7B, shared, 8, rank) > 0 for rank in range(8)] == [True] * 2 + [False] * 6
    experts = train(dtype="bfloat16", expert_parallel=4)
    held = rank_parameters(QWEN_30B, layout_of(experts), 0)
    found = [saved_bytes(QWEN_30B, experts, 8, rank) for rank in range(8)]
    assert found == [14 * held.all, *[14 * held.experts] * 3, 0, 0, 0, 0]


def test_each_of_the_ranks_that_share_an_optimizer_copies_its_part_of_it():
    """Of weights 2 bytes a parameter by the first rank, of the optimizer 12; experts are split over four, and held by two."""
    held = rank_parameters(QWEN_7B, layout_of(train()), 0).all
    options = train(dtype="bfloat16", distributed_optimizer=True)
    saved = [saved_bytes(QWEN_7B, options, 16, rank) for rank in range(16)]
    assert saved == [2 * held + 12 * held // 16, *[12 * held // 16] * 15]
    embedding = 12 * 152_064 * 3_584  # which may begin on one node and end on the other
    assert saved_on_a_node(QWEN_7B, options, 16, 8) == 2 * held + 12 * held // 2 + embedding
    assert saved_on_a_node(QWEN_7B, options, 16, 16) == 14 * held
    experts = train(dtype="bfloat16", expert_parallel=4, distributed_optimizer=True)
    held = rank_parameters(QWEN_30B, layout_of(experts), 0)
    share = 12 * held.shared // 8 + 12 * held.experts // 2
    first, *others = (saved_bytes(QWEN_30B, experts, 8, rank) for rank in range(8))
    assert first == 2 * held.all + share
    assert others == [*[2 * held.experts + share] * 3, *[share] * 4]


def test_the_version_that_deltas_are_taken_from_is_kept_at_all_times_by_who_sends_it():
    count = 7_615_616_512
    options = train(dtype="bfloat16", pipeline_parallel=2)
    config = Config(train=options, sample=SampleOptions(dtype="bfloat16"))
    assert kept_bytes(config, QWEN_7B, 2) == 0
    kept = kept_bytes(replace(config, weights=WeightsOptions(delta=True)), QWEN_7B, 2)
    assert kept == 2 * count
    by_files = WeightsOptions(delta=True, transport="filesystem")  # which hold whole versions
    assert kept_bytes(replace(config, weights=by_files), QWEN_7B, 2) == 0
    own = kept_bytes(replace(config, weights=WeightsOptions(delta=True, transport="lanes")), QWEN_7B, 2)
    assert own == count  # each rank its own half
    assert gathered_bytes(config, QWEN_7B) == kept
    assert gathered_bytes(replace(config, weights=WeightsOptions(transport="lanes")), QWEN_7B) == 0
    for stage, more in ((0, kept), (1, 0)):
        without = rank_memory(QWEN_7B, options, 2, 1024, stage)
        assert rank_memory(QWEN_7B, options, 2, 1024, stage, 1, kept).sent_before == more
        assert rank_memory(QWEN_7B, options, 2, 1024, stage, 0, own).total == without.total + own
    assert "sent before 14.2 GiB" in describe_memory(QWEN_7B, options, 2, 1024, kept_bytes=kept)


def test_the_estimate_in_words():
    words = describe_memory(QWEN_7B, train(dtype="bfloat16", pipeline_parallel=2), 2, 4096)
    assert "a trainer rank of stage " in words
    assert "for micro-batches of 4096 tokens" in words
    assert "parameters 7.1 GiB, gradients 14.2 GiB, optimizer 42.6 GiB, activations" in words


def test_what_a_version_on_its_way_needs_in_words():
    """Of Qwen2.5-7B in bfloat16, 14.2 GiB."""

    def words(transport, tensor_parallel, delta=False):
        weights = WeightsOptions(transport=transport, delta=delta)
        return describe_weights(QWEN_7B, Config(weights=weights, sample=SampleOptions(tensor_parallel=tensor_parallel)))

    gathered = words("gather", 4)
    assert gathered.startswith(
        "  a version of the weights has 14.2 GiB\n    a sampler's worker holds 14.2 GiB more while one arrives\n"
    )
    assert "up to 28.4 GiB of disk while a sampler that came back" in gathered
    assert "a sampler's worker holds 14.2 GiB more at all times" in words("gather", 4, delta=True)
    by_files = words("filesystem", 4)
    assert "a sampler's worker holds 3.5 GiB more while one arrives" in by_files
    assert words("filesystem", 4, delta=True) == by_files
    by_lanes = words("lanes", 4)
    assert "a sampler's worker holds 3.5 GiB more while one arrives" in by_lanes
    assert "takes up to 0.5 GiB of buffers besides" in by_lanes
    assert words("lanes", 4, delta=True) == by_lanes.replace("0.5 GiB of buffers", "0.8 GiB of buffers")
    assert "up to 28.4 GiB of disk while each version is written\n" in by_files
    assert by_files.endswith("\n    whoever writes there needs 1.0 GiB of the host's memory")
    assert all(len(line) <= 120 for text in (gathered, by_files, by_lanes) for line in text.splitlines())
