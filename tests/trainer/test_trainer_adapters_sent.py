"""Samplers get weights with the trained adapters (LoRA) merged into them, by lanes the same as by any other way."""

import pytest
import torch
from families import tensors_of

MODEL = "qwen2_linear"
DTYPES = ("float32", "bfloat16")
LAYOUTS = [
    (1, "one"),
    (1, "values"),
    (1, "recomputed"),
    (2, "tensor"),
    (2, "sequence"),
    (2, "data"),
    (2, "stages"),
    (2, "large"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_lanes_bring_what_is_gathered_bit_by_bit(families, ranks, layout, workers, dtype):
    """Also where many buckets cut the weights to pieces: `large`, which the trainer has in bfloat16."""
    found = families[ranks, f"sent_{layout}_{workers}_{dtype}"]
    whole = tensors_of(families.folder / ("large" if layout == "large" else MODEL))
    assert found["elements"] == sum(tensor.numel() for tensor in whole.values())
    assert found["unlike"].tolist() == []
    assert found["digest"] == found["gathered"]
    assert found["merged"].tolist() == sorted(name for name in whole if name.endswith("proj.weight"))
    assert found["buckets"] > (15 if layout == "large" else 0)


@pytest.mark.parametrize(("name", "key"), [("o", "self_attn.o_proj"), ("down", "mlp.down_proj")])
def test_what_is_sent_is_the_sum_rounded_once(families, name, key):
    """W + (32 / rank) B A of the adapter that was trained, in float64."""
    trained, before = families[1, "adapted_one"], tensors_of(families.folder / MODEL)
    weight = before[f"model.layers.1.{key}.weight"]
    a, b = (torch.from_numpy(trained[f"{name}_{factor}"]).double() for factor in "ab")
    product = 8 * b @ a
    assert product.abs().max() > 0.01
    expected = weight.double() + product
    sent = [torch.from_numpy(families[1, f"sent_one_1_{dtype}"][f"model.layers.1.{key}.weight"]) for dtype in DTYPES]
    torch.testing.assert_close(sent[0].double(), expected, rtol=1e-6, atol=1e-7)
    # A sum in float32 may fall on the other side of the middle between two numbers of bfloat16, rarely.
    assert (sent[1].bfloat16() != expected.bfloat16()).double().mean() < 0.01
    assert (weight.bfloat16() + product.bfloat16() != expected.bfloat16()).double().mean() > 0.1
