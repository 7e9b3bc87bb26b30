"""Every model family against transformers, for one rank, tensor-parallel ranks and ranks that share experts; and what loading,
writing and exporting make of their folders."""

import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from families import CONFIGS, EXPERT_MODELS, LENGTHS, microbatch, routings, tensors_of
from families_worker import SEED
from safetensors import safe_open
from safetensors.torch import save_file
from trainer_data import VOCABULARY
from transformers import AutoModelForCausalLM

from prl.config.hf_config import UnsupportedModelError, model_config, new_model_config, read_model_config
from prl.runfolder.manifest import Manifest, part_of, write_manifest
from prl.runfolder.paths import RunFolder
from prl.trainer.export import export_checkpoint
from prl.trainer.hf_folder import read_weights, write_folder
from prl.trainer.options import ModelOptions
from prl.trainer.table import random_weights

TOOL = Path(__file__).parents[2] / "tools" / "export_checkpoint.py"


def assert_equal_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(np.asarray(found[name]).view(np.int32), np.asarray(tensor).view(np.int32)), name


def hugging_face(families, name):
    return AutoModelForCausalLM.from_pretrained(families.folder / name, dtype=torch.float32).eval()


def expected_logits(model):
    tokens = torch.from_numpy(np.random.default_rng(3).integers(0, VOCABULARY, sum(LENGTHS)))
    return torch.cat([model(part[None]).logits[0] for part in tokens.split(list(LENGTHS))])


CASES = [
    *((1, "one", name) for name in [*CONFIGS, "qwen3_moe_fused"]),
    *((2, "tensor", name) for name in CONFIGS),
    *((2, "sequence", name) for name in ("qwen3_moe", "llama_yarn")),
    *((2, "experts", name) for name in EXPERT_MODELS),
]


@pytest.mark.parametrize(("ranks", "layout", "name"), CASES)
def test_logits_equal_transformers_and_the_export_is_the_folder(families, ranks, layout, name):
    found = dict(families[ranks, f"{layout}_{name}"])
    with torch.no_grad():
        expected = expected_logits(hugging_face(families, name)).numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found.pop("logits"), expected, atol=1e-4)
    assert_equal_bits(found, tensors_of(families.folder / name.removesuffix("_fused")))


@pytest.mark.parametrize(
    ("label", "name"),
    [
        *(("gradients", name) for name in CONFIGS),
        *(("replayed_gradients", name) for name in EXPERT_MODELS),
        # A window, and a scale of attention's own, through the kernels that GPUs have.
        *((f"{x}_gradients", name) for name in ("mistral", "llama_yarn") for x in ("varlen", "transformer_engine")),
    ],
)
def test_gradients_equal_those_of_transformers(families, label, name):
    model = with_routings(hugging_face(families, name)) if label == "replayed_gradients" else hugging_face(families, name)
    batch = microbatch()
    tokens, weights = (
        torch.from_numpy(values).split(list(LENGTHS)) for values in (batch.tokens.astype(np.int64), batch.loss_weights)
    )
    for part, factors in zip(tokens, weights, strict=True):
        logprobs = model(part[None]).logits[0, :-1].log_softmax(-1).gather(-1, part[1:, None])[:, 0]
        (logprobs * factors[1:]).sum().backward()
    expected = {}
    for key, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        if key.endswith("experts.gate_up_proj"):
            for number, (gate, up) in enumerate(np.split(matrix, 2) for matrix in gradient):
                stem = key.replace("gate_up_proj", str(number))
                expected |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif key.endswith("experts.down_proj"):
            expected |= {key.replace("down_proj", f"{n}.down_proj.weight"): matrix for n, matrix in enumerate(gradient)}
        else:
            expected[key] = gradient
    found = families[1, f"{label}_{name}"]
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        largest = np.abs(gradient).max()
        assert largest > 1e-3, key
        np.testing.assert_allclose(found[key], gradient, rtol=0, atol=1e-5 * largest, err_msg=key)


def with_routings(model):
    """transformers' model whose routers take what was recorded, one packed sequence after another."""
    for number, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate
        given = iter(np.split(routings()[:, number], np.cumsum(LENGTHS)[:-1]))

        def forward(hidden, gate=gate, given=given):
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            shares = logits.softmax(-1)
            recorded = torch.from_numpy(next(given).astype(np.int64))
            experts = torch.where(recorded < 0, shares.topk(gate.top_k).indices, recorded)
            weights = shares.gather(1, experts)
            return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, experts

        gate.forward = forward
    return model


@pytest.mark.parametrize(
    ("ranks", "layout", "name"),
    [*((1, "one", name) for name in EXPERT_MODELS), (2, "sequence", "qwen3_moe"), (2, "experts", "qwen3_moe")],
)
def test_tokens_go_to_the_experts_that_the_sampler_chose(families, ranks, layout, name):
    found = families[ranks, f"replayed_{layout}_{name}"]
    with torch.no_grad():
        own = expected_logits(hugging_face(families, name)).numpy()
        expected = expected_logits(with_routings(hugging_face(families, name))).numpy()
    np.testing.assert_allclose(found["given"], expected, atol=1e-4)
    assert np.abs(expected - own).max() > 0.1
    for label in ("own", "evaluated"):
        np.testing.assert_allclose(found[label], own, atol=1e-4)


def test_routings_of_a_micro_batch_are_filled_up_with_unknown_ones(families):
    found = families[1, "routed"]
    assert len(found["given"]) == 21
    assert found["found"].shape == (24, 2, 2)
    assert np.array_equal(found["found"][:21], found["given"])
    assert (found["found"][21:] == -1).all()


ADAPTED = [(1, "recomputed"), (2, "tensor"), (2, "sequence"), (2, "data"), (2, "stages")]


def test_adapters_have_the_gradients_that_follow_from_the_weights(families):
    """Of W + (32 / rank) B A with B = 0: to A none, to B that of W times A^T, scaled."""
    found = families[1, "adapter_gradients"]
    model = hugging_face(families, "qwen2_linear")
    expected_logits(model).log_softmax(-1)[:, 7].sum().backward()
    layer = model.model.layers[1]
    for name, linear in (("o", layer.self_attn.o_proj), ("down", layer.mlp.down_proj)):
        assert not found[f"{name}_of_a"].any()
        expected = 8 * linear.weight.grad.numpy() @ found[f"{name}_a"].T
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found[f"{name}_of_b"], expected, atol=1e-4)


@pytest.mark.parametrize(("ranks", "layout"), [(1, "one"), (1, "values"), *ADAPTED])
def test_training_adapters_changes_attention_and_feed_forward_layers_alone(families, ranks, layout):
    before = tensors_of(families.folder / "qwen2_linear")
    assert_equal_bits(families[ranks, f"adapted_start_{layout}"], before)
    after = families[ranks, f"adapted_{layout}"]
    for name, tensor in before.items():
        assert np.array_equal(after[name], tensor.numpy()) != name.endswith("proj.weight"), name
    adapters = 2 * 4 * (1 if layout == "stages" else 2)  # A and B of four matrices a layer
    assert after["trained"] == adapters + (layout == "values")


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_linear"])
def test_adapters_are_refused_beside_experts_and_transformer_engine(families, name):
    """Whatever was checked before: on the machine that submits a run Transformer Engine may not be known of."""
    words = str(families[1, "refused_adapters"][name])
    assert words == "train.lora_rank: adapters are for dense models without Transformer Engine; set it to 0"


def test_a_value_head_is_trained_and_saved_with_adapters(families):
    found = families[1, "adapted_values"]
    assert np.array_equal(found["resumed"], found["losses"][2])
    assert not np.array_equal(found["losses"], families[1, "adapted_one"]["losses"])


@pytest.mark.parametrize(("ranks", "layout"), ADAPTED)
def test_adapters_do_not_depend_on_the_layout(families, ranks, layout):
    found, expected = families[ranks, f"adapted_{layout}"], families[1, "adapted_one"]
    np.testing.assert_allclose(found["losses"][:, 0], expected["losses"][:, 0], atol=1e-5)
    np.testing.assert_allclose(found["losses"][:, 1], expected["losses"][:, 1], rtol=1e-4)
    assert len(set(expected["losses"][:, 0])) == 3
    loss, norm = found["resumed"]
    assert loss == pytest.approx(expected["losses"][2, 0], abs=1e-5)
    assert norm == pytest.approx(expected["losses"][2, 1], rel=1e-4)


@pytest.mark.parametrize(("ranks", "layout"), [(1, "one"), (1, "values"), *ADAPTED])
def test_merged_weights_are_what_the_trainer_computes_with(families, tmp_path, ranks, layout):
    found = families[ranks, f"adapted_{layout}"]
    checkpoint = families.folder / f"ranks_{ranks}" / f"adapted_{layout}" / "trainer"
    export_checkpoint(checkpoint, families.folder / "qwen2_linear", tmp_path / "out")
    saved, exported = families[ranks, f"adapted_saved_{layout}"], tensors_of(tmp_path / "out")
    assert saved.keys() == exported.keys()
    for name, tensor in exported.items():
        np.testing.assert_allclose(tensor.numpy(), saved[name], atol=1e-6, err_msg=name)
    if "logits" in found:
        model = AutoModelForCausalLM.from_pretrained(families.folder / "qwen2_linear", dtype=torch.float32).eval()
        model.load_state_dict({name: torch.from_numpy(found[name]) for name in saved})
        with torch.no_grad():
            np.testing.assert_allclose(found["logits"], expected_logits(model).numpy(), atol=1e-4)


def test_a_window_hides_what_lies_before_it(families):
    config = json.loads((families.folder / "mistral" / "config.json").read_text())
    assert config["sliding_window"] == 7 < max(LENGTHS)
    found = families[1, "one_mistral"]["logits"]
    model = hugging_face(families, "mistral")
    model.config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.config.sliding_window = None
    with torch.no_grad():
        assert np.abs(found - expected_logits(model).numpy()).max() > 1e-2


@pytest.mark.parametrize("layout", ["tensor", "experts", "stages"])
def test_drawn_weights_do_not_depend_on_the_layout(families, layout):
    expected = dict(random_weights(read_model_config(families.folder / "qwen3_moe"), SEED))
    assert_equal_bits(families[2, f"drawn_{layout}_qwen3_moe"], expected)


@pytest.mark.parametrize(("layout", "name"), [("tensor", "mistral"), ("experts", "qwen3_moe"), ("stages", "llama_yarn")])
def test_a_checkpoint_of_any_layout_exports_to_the_folder_it_began_from(families, tmp_path, layout, name):
    checkpoint = families.folder / "ranks_2" / f"saved_{layout}_{name}" / "trainer"
    export_checkpoint(checkpoint, families.folder / name, tmp_path / "out")
    assert_equal_bits(tensors_of(tmp_path / "out"), tensors_of(families.folder / name))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_an_export_may_have_another_dtype_and_must_be_of_the_model(families, tmp_path):
    checkpoint = families.folder / "ranks_2" / "saved_stages_llama_yarn" / "trainer"
    export_checkpoint(checkpoint, families.folder / "llama_yarn", tmp_path / "out", "bfloat16")
    found = tensors_of(tmp_path / "out")
    for name, tensor in tensors_of(families.folder / "llama_yarn").items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match=r"another one than when .* was written: architecture = mistral, which was llama"):
        export_checkpoint(checkpoint, families.folder / "mistral", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("saved", "changes", "words"),
    [
        ("experts_qwen3_moe", {"num_hidden_layers": 1}, "another model"),
        ("experts_qwen3_moe", {"num_experts": 2}, "another model"),
        ("experts_qwen3_moe", {"hidden_size": 64}, "without .*: it is of another model"),
        ("experts_qwen3_moe", {"tie_word_embeddings": None}, "output_layer.weight"),
        ("stages_llama_yarn", {"num_hidden_layers": 1}, "another model"),
    ],
)
def test_a_checkpoint_that_does_not_say_of_which_model_it_is_exports_as_that_alone(
    families, tmp_path, monkeypatch, saved, changes, words
):
    """As earlier versions of prl wrote them: what the tensors say counts."""
    monkeypatch.setattr("prl.trainer.export._Reader.facts", lambda self: {})
    checkpoint = families.folder / "ranks_2" / f"saved_{saved}" / "trainer"
    source = families.folder / saved.partition("_")[2]
    export_checkpoint(checkpoint, source, tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((source / "config.json").read_text())
    if "tie_word_embeddings" in changes:
        changes = {"tie_word_embeddings": not config["tie_word_embeddings"]}
    (other / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=words):
        export_checkpoint(checkpoint, other, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.fixture
def run(families, tmp_path):
    """The folder of a run with one checkpoint."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.model.symlink_to(families.folder / "qwen3_moe")
    folder = run.checkpoint(1)
    shutil.copytree(families.folder / "ranks_2" / "saved_experts_qwen3_moe" / "trainer", folder / "trainer")
    parts = tuple(part_of(folder, path) for path in (folder / "trainer").iterdir())
    facts = {"attempt": 1, "lineage": 0, "forks": {}, "streams": {}, "evaluations_reached": 0}
    write_manifest(run, Manifest(step=1, dispatcher={"events": 0}, parts=parts, **facts))
    return run


def export(run, target, *options, python=()):
    command = [sys.executable, *python, str(TOOL), str(run.path), str(target), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_the_command_exports_a_runs_newest_checkpoint_and_refuses_a_damaged_one(families, run, tmp_path):
    done = export(run, tmp_path / "out", python=("-X", "importtime"))
    assert (done.returncode, done.stdout) == (0, f"step 1: {tmp_path}/out, 0.0 GB\n"), done.stderr
    assert "prl.trainer.export" in done.stderr  # the modules that it imports
    assert "megatron" not in done.stderr
    assert_equal_bits(tensors_of(tmp_path / "out"), tensors_of(families.folder / "qwen3_moe"))
    again = export(run, tmp_path / "out", "--step", "1")
    assert again.returncode == 1
    assert again.stderr == f"export_checkpoint: {tmp_path}/out exists; remove it, or name another folder\n"

    file = next((run.checkpoint(1) / "trainer").glob("__0_*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    damaged = export(run, tmp_path / "other")
    assert damaged.returncode == 1
    assert f"{file}: its content is not what was written" in damaged.stderr
    assert "no whole checkpoint lies there" in damaged.stderr
    assert not (tmp_path / "other").exists()


def test_a_written_folder_is_split_into_files_that_transformers_loads(families):
    written = families.folder / "ranks_1" / "written"
    files = sorted(path.name for path in written.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for path in written.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert sum(file.get_tensor(name).nbytes for name in file.keys()) <= 20_000  # noqa: SIM118
    index = json.loads((written / "model.safetensors.index.json").read_text())
    whole = tensors_of(families.folder / "qwen3_moe")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert index["weight_map"].keys() == whole.keys()
    assert_equal_bits(tensors_of(written), whole)
    assert dict(read_weights(written, read_model_config(written))).keys() == whole.keys()
    with torch.no_grad():
        again = expected_logits(AutoModelForCausalLM.from_pretrained(written).eval())
        torch.testing.assert_close(again, expected_logits(hugging_face(families, "qwen3_moe")), rtol=0, atol=1e-5)


def test_writing_holds_one_file_of_weights(families, tmp_path):
    alive = weakref.WeakSet()
    most = 0

    def tensors():
        nonlocal most
        for number in range(20):
            tensor = torch.full((1000,), float(number))
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"tensor_{number}", tensor

    write_folder(tmp_path / "out", tensors(), families.folder / "mistral", "float32", 3 * 4000)
    assert most <= 5  # three of a file, the next one, and the one in hand
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda found: found.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            r"1 tensors missing, e.g. model.layers.1.mlp.experts.2.up",
        ),
        (lambda found: found.update(extra=torch.ones(1)), "1 tensors unknown, e.g. extra"),
        (
            lambda found: found.update({"model.norm.weight": torch.ones(31)}),
            r"1 tensors of another shape, e.g. model.norm.weight is \[31\], not",
        ),
    ],
)
def test_a_folder_that_does_not_fit_its_config(families, tmp_path, change, words):
    found = tensors_of(families.folder / "qwen3_moe")
    change(found)
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=words):
        list(read_weights(tmp_path, read_model_config(families.folder / "qwen3_moe")))


def test_a_file_of_weights_that_cannot_be_read_is_named(tmp_path):
    model = model_config(new_model_config(ModelOptions(init="random", architecture="qwen3"), end=0, pad=0))
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "whole.safetensors")
    cut, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    cut.write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-1])
    with pytest.raises(UnsupportedModelError, match=rf"^{tmp_path}: {cut.name} is damaged .*; download it again$"):
        list(read_weights(tmp_path, model))
    index.write_text('{"weight_map": {"model.norm.weight": "absent.safetensors"}}')
    with pytest.raises(UnsupportedModelError, match=rf"^{tmp_path}: has no file absent.safetensors, which its "):
        list(read_weights(tmp_path, model))
