"""Plans of lanes: every element comes once, from where it is; roots share the work; nobody waits in a circle."""

import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

from lane_cases import BASE, EXPERTS, MODELS, TENSOR, check_transfer, layouts, numbered_tensors, rank_parameters, worker_tensors
from lane_plans import MODELS as MODELS_OF_SIZE

from prl.config.hf_config import ModelConfig, model_config
from prl.config.layout import Layout, tensor_misfit
from prl.weights.compile import compile_plan
from prl.weights.plan import LanePlan, Leg, TensorSpec, Tile, lane_buckets, schedule
from prl.weights.shards import sampler_shards, trainer_shards
from prl.weights.traffic import scheduled_s, traffic

LINK = 46e9  # bytes a second that 400 Gb/s carry


def sized(name: str) -> ModelConfig:
    return model_config(MODELS_OF_SIZE[name])


def laid_out(tensor: int = 1, pipeline: int = 1, virtual: int = 1, expert: int = 1, context: int = 1) -> Layout:
    return Layout(tensor=tensor, pipeline=pipeline, virtual=virtual, context=context, expert=expert)


# --- every element once, from where it is ---


@pytest.mark.parametrize("workers", TENSOR)
@pytest.mark.parametrize("tensor", TENSOR)
@pytest.mark.parametrize("name", MODELS)
def test_every_element_comes_once(name, tensor, workers):
    model = MODELS[name]
    full = numbered_tensors(model)
    for layout, ranks in layouts(model, tensor):
        check_transfer(compile_plan(model, layout, ranks, workers, "float32"), model, layout, 2000, full)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelConfig, Layout, int, int, int]:
    """Any small model in any layout that fits it: the ranks, a sampler's workers and the size of buckets come with them."""

    def pick(*choices: int) -> int:
        return draw(st.sampled_from(choices))

    kv_heads, architecture = pick(1, 2, 3, 4), draw(st.sampled_from(["qwen2", "qwen3", "llama", "qwen3_moe"]))
    heads, head_dim = kv_heads * pick(1, 2, 3), pick(2, 4)
    stages, turns = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]))
    experts = EXPERTS | {"num_experts": pick(2, 4, 6), "moe_intermediate_size": pick(2, 3, 8)}
    raw = {
        "model_type": architecture,
        "vocab_size": draw(st.integers(1, 200)),
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "intermediate_size": pick(6, 8, 12),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": stages * turns * pick(1, 2),
        "tie_word_embeddings": draw(st.booleans()),
    }
    model = model_config(BASE | raw | (experts if architecture == "qwen3_moe" else {}))
    fitting = [n for n in (1, 2, 3, 4, 6, 8) if not tensor_misfit(model, n)]
    tensor = pick(*fitting)
    shared = [n for n in fitting if not model.experts or (model.expert_ffn_size % n == 0 and n <= model.experts)]
    workers = pick(*(n for n in shared if n not in (3, 6)))  # vocabularies are padded to 64
    expert = pick(*(n for n in (1, 2, 3, 4) if model.experts % n == 0)) if model.experts else 1
    layout = laid_out(tensor, stages, turns, expert, context=pick(1, 1, 2))
    return (
        model,
        layout,
        layout.unit * (pick(1, 2, 3) if layout.unit <= 16 else 1),
        workers,
        draw(st.integers(4 * model.hidden_size, 10000)),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_element_of_any_model_comes_once(case):
    model, layout, ranks, workers, bucket_bytes = case
    row_bytes = 4 * max(model.hidden_size, model.ffn_size, model.heads * model.head_dim, model.expert_ffn_size)
    plan = compile_plan(model, layout, ranks, workers, "float32")
    check_transfer(plan, model, layout, max(bucket_bytes, row_bytes), numbered_tensors(model))


@pytest.mark.parametrize("name", MODELS)
def test_digests_count_every_element_of_a_model_once(name):
    for workers in TENSOR:
        full = numbered_tensors(MODELS[name])
        held = worker_tensors(MODELS[name], workers, full)
        names, counted = list(full), []
        for own, shards in zip(held, sampler_shards(MODELS[name], workers), strict=True):
            counted += [own[names[shard.tile.tensor]].reshape(-1) for shard in shards if shard.counted]
        found = sorted(int(number) for part in counted for number in part)
        assert found == list(range(sum(tensor.size for tensor in full.values())))


def test_a_rank_holds_all_rows_of_its_parameters_but_padding():
    for model in MODELS.values():
        for tensor in TENSOR:
            for layout, ranks in layouts(model, tensor):
                parameters = rank_parameters(model, layout, ranks, numbered_tensors(model))
                for held, own in zip(trainer_shards(model, layout, ranks), parameters, strict=True):
                    rows: Counter[str] = Counter()
                    for one in held:
                        (name,) = (name for name in one.parameters if name in own)
                        assert one.at_row == rows[name]
                        rows[name] += one.tile.rows
                    real = {name: int((own[name].reshape(len(own[name]), -1)[:, 0] >= 0).sum()) for name in own}
                    assert rows == {name: count for name, count in real.items() if count}


# --- refusals ---


@pytest.mark.parametrize(
    ("changes", "layout", "ranks", "workers", "words"),
    [
        ({}, laid_out(3), 3, 1, "train.tensor_parallel = 3 does not divide the model's 8 query heads"),
        ({}, laid_out(), 1, 3, "sample.tensor_parallel = 3 does not divide the model's 8 query heads"),
        ({}, laid_out(2, 2), 6, 1, "ranks must be a multiple of 4"),
        ({}, laid_out(1, 3), 3, 1, "layers of 3"),
        (EXPERTS | {"model_type": "qwen3_moe"}, laid_out(expert=3), 3, 1, "experts of 3"),
        (EXPERTS | {"model_type": "qwen3_moe", "moe_intermediate_size": 6}, laid_out(), 1, 4, "the width of experts, 6"),
        (EXPERTS | {"model_type": "qwen3_moe", "num_experts": 2}, laid_out(), 1, 4, "4 is more than the model's 2 experts"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40, "intermediate_size": 60},
            laid_out(),
            1,
            5,
            "sample.tensor_parallel = 5 does not divide the vocabulary padded to 192",
        ),
    ],
)
def test_what_cannot_be_shared_so_is_refused(changes, layout, ranks, workers, words):
    model = model_config(BASE | {"model_type": "llama"} | changes)
    with pytest.raises(ValueError, match=words):
        compile_plan(model, layout, ranks, workers, "float32")


# --- who sends how much ---


def least_possible(plan: LanePlan, model: ModelConfig, layout: Layout) -> float:
    """The fewest bytes that the busiest root can have to send: for some ranks together, those that nobody else holds."""
    holders: dict[Tile, set[int]] = defaultdict(set)
    for rank, held in enumerate(trainer_shards(model, layout, plan.trainer_ranks)):
        for one in held:
            holders[one.tile].add(rank)
    needed: Counter[frozenset[int]] = Counter()
    by_tensor: dict[int, list[tuple[Tile, frozenset[int]]]] = defaultdict(list)
    for tile, ranks in holders.items():
        by_tensor[tile.tensor].append((tile, frozenset(ranks)))
    for shards in sampler_shards(model, plan.lanes):
        for shard in shards:
            for tile, ranks in by_tensor[shard.tile.tensor]:
                part = tile.within(shard.tile)
                needed[ranks] += plan.tile_bytes(part) if part else 0
    unions = {frozenset().union(*some) for n in range(1, min(len(needed), 4) + 1) for some in combinations(needed, n)}
    unions.add(frozenset().union(*needed))
    return max(sum(size for ranks, size in needed.items() if ranks <= union) / len(union) for union in unions)


@pytest.mark.parametrize(
    ("name", "layout", "ranks", "workers"),
    [
        ("7B", laid_out(), 8, 1),
        ("7B", laid_out(), 8, 4),
        ("7B", laid_out(), 3, 4),
        ("7B", laid_out(4), 8, 2),
        ("7B", laid_out(2, 2, 2), 8, 4),
        ("32B", laid_out(8), 16, 8),
        ("32B", laid_out(4, 2), 16, 8),
        ("32B", laid_out(2, 4, 2), 16, 2),
        ("70B", laid_out(8, 2), 32, 4),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_roots_send_equally_much_as_far_as_they_hold_it(name, layout, ranks, workers, tied):
    """In few legs: there are never many more than ranks and lanes."""
    model = replace(sized(name), tied=tied)
    plan = compile_plan(model, layout, ranks, workers, "bfloat16")
    carried = traffic(plan)
    assert max(carried.roots) <= 1.05 * least_possible(plan, model, layout)
    assert len(plan.legs) <= 2 * max(ranks, workers)


def test_bytes_of_roots_lanes_and_links_add_up():
    plan = compile_plan(sized("32B"), laid_out(2), 4, 16, "bfloat16")
    carried = traffic(plan)
    repeated = 2 * 64 * 8 * 128 * 5120 * 2  # 8 key-value heads for 16 workers: a second time
    norms = ((2 * 64 + 1) * 5120 + 2 * 64 * 128) * 2
    model_bytes = sum(spec.bytes for spec in plan.tensors)
    assert sum(carried.lanes) == sum(carried.roots) == sum(carried.links.values()) == model_bytes + repeated + 15 * norms
    assert carried.roots == tuple(sum(size for (r, _), size in carried.links.items() if r == root) for root in range(4))
    assert len(set(carried.lanes)) == 1


@pytest.mark.parametrize(
    ("name", "layout", "ranks", "workers", "floor_s"),
    [
        ("7B", laid_out(4), 8, 1, 0.33),
        ("7B", laid_out(4), 8, 4, 0.083),
        ("32B", laid_out(8, 2), 32, 8, 0.178),
        ("70B", laid_out(8, 4), 64, 8, 0.383),
        pytest.param("235B", laid_out(4, 2, expert=8), 64, 8, 1.28, marks=pytest.mark.slow),
    ],
)
def test_the_order_of_transfers_keeps_links_as_busy_as_can_be(name, layout, ranks, workers, floor_s):
    """The floors are the models' sizes divided by the lanes' links."""
    plan = compile_plan(sized(name), layout, ranks, workers, "bfloat16")
    assert traffic(plan).floor_s(LINK) == pytest.approx(floor_s, rel=0.02)
    assert scheduled_s(plan, 2**28, LINK) <= 1.05 * traffic(plan).floor_s(LINK)


def test_a_large_plan_is_made_within_seconds():
    started_s = time.process_time()
    plan = compile_plan(sized("70B"), laid_out(8, 4), 64, 8, "bfloat16")
    plan.digest()
    schedule(plan, 2**28)
    assert time.process_time() - started_s < 3


# --- the order of transfers ---


@settings(max_examples=40, deadline=None)
@given(cases())
def test_nobody_waits_in_a_circle(case):
    """Everybody does its own part in its order, and a transfer takes place once both are at it."""
    model, layout, ranks, workers, _ = case
    plan = compile_plan(model, layout, ranks, workers, "float32")
    bucket_bytes = 4 * max(model.hidden_size, model.ffn_size, model.heads * model.head_dim, model.expert_ffn_size)
    waiting: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for turn in reversed(schedule(plan, bucket_bytes)):
        waiting["root", turn[0]].append(turn)
        waiting["lane", turn[1]].append(turn)
    done: dict[tuple[int, int], list[int]] = defaultdict(list)
    ready = set(waiting)
    while ready:
        kind, number = ready.pop()
        if not waiting[kind, number]:
            continue
        turn = waiting[kind, number][-1]
        root, lane, bucket = turn
        if waiting["root", root][-1] == turn == waiting["lane", lane][-1]:
            waiting["root", root].pop()
            waiting["lane", lane].pop()
            done[root, lane].append(bucket)
            ready |= {("root", root), ("lane", lane)}
    assert not any(waiting.values())
    for leg in plan.legs:
        assert done.pop((leg.root, leg.lane)) == list(range(len(lane_buckets(plan, leg, bucket_bytes))))
    assert not done


# --- buckets ---


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), max_size=8), st.integers(20, 100))
def test_buckets_hold_the_tiles_in_their_order_cut_between_rows(sizes, bucket_bytes):
    specs = tuple(TensorSpec(f"t{n}", "float32", shape) for n, shape in enumerate(sizes))
    leg = Leg(0, 0, tuple(Tile(n, 0, rows, 0, columns) for n, (rows, columns) in enumerate(sizes)))
    plan = LanePlan(specs, 1, 1, (leg,))
    buckets = lane_buckets(plan, leg, bucket_bytes)
    rows = [(t.tensor, row) for tiles in buckets for t in tiles for row in range(t.row, t.row + t.rows)]
    assert rows == [(n, row) for n, (count, _) in enumerate(sizes) for row in range(count)]
    assert all(t.rows and (t.column, t.columns) == (0, sizes[t.tensor][1]) for tiles in buckets for t in tiles)
    used = [sum(map(plan.tile_bytes, tiles)) for tiles in buckets]
    assert all(size <= bucket_bytes for size in used)
    for size, tiles in zip(used, buckets[1:], strict=False):
        assert size + plan.tile_bytes(tiles[0]) // tiles[0].rows > bucket_bytes, "the next row would have fitted"


def test_a_row_larger_than_a_bucket_is_refused():
    plan = compile_plan(MODELS["plain"], laid_out(), 1, 1, "float32")
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight has rows of 256 bytes, which a bucket of 255 bytes"):
        lane_buckets(plan, plan.legs[0], 255)


# --- what both ends agree on ---


def test_other_plans_have_other_digests_and_every_process_the_same():
    model = MODELS["experts"]
    plans = [
        compile_plan(model, laid_out(), 2, 2, "float32"),
        compile_plan(model, laid_out(), 2, 2, "bfloat16"),
        compile_plan(model, laid_out(), 4, 2, "float32"),
        compile_plan(model, laid_out(), 2, 4, "float32"),
        compile_plan(model, laid_out(2), 2, 2, "float32"),
        compile_plan(model, laid_out(expert=2), 2, 2, "float32"),
        compile_plan(MODELS["plain"], laid_out(), 2, 2, "float32"),
    ]
    digests = [plan.digest() for plan in plans]
    assert len(set(digests)) == len(plans)
    program = (
        "import sys; from lane_cases import MODELS; from prl.config.layout import Layout; "
        "from prl.weights.compile import compile_plan; "
        "plan = compile_plan(MODELS['experts'], Layout(1, 1, 1, 1, 1), 2, 2, 'float32'); "
        "print(plan.digest(), 'torch' in sys.modules)"
    )
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r}); {program}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [digests[0], "False"]
