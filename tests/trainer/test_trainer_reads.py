"""What each rank reads of a model's files: its own parts of the tensors and nothing else."""

import re

import pytest
from families import tensors_of

CASES = [
    *(("tensor", "large"), ("stages", "large"), ("stages", "llama_yarn")),
    *(("experts", "qwen3_moe"), ("experts", "qwen3_moe_fused"), ("tensor_experts", "qwen3_moe")),
]


def own_bytes(layout: str, name: str, shape: tuple[int, ...], rank: int, *, tied: bool) -> int:
    """Of a float32 tensor of a model with two layers, or with four experts in each, on one of two ranks."""
    rows, row_bytes = shape[0], 4 * (shape[1] if len(shape) > 1 else 1)
    layer, expert = (re.search(rf"{what}\.(\d+)\.", name) for what in ("layers", "experts"))
    embedding, head, last_norm = name == "model.embed_tokens.weight", name == "lm_head.weight", name == "model.norm.weight"
    if layout == "stages":
        here = int(layer[1]) == rank if layer else (rank == 0 or tied) if embedding else rank == 1
        assert layer or embedding or head or last_norm
        return rows * row_bytes * here
    if expert and "experts" in layout:
        return rows * row_bytes * (int(expert[1]) // 2 == rank)
    if "tensor" not in layout or name.endswith(("norm.weight", "mlp.gate.weight")):
        return rows * row_bytes
    if embedding or head:  # padded to an even number of rows
        first = (rows + 1) // 2
        return (rows - first if rank else first) * row_bytes
    return rows * row_bytes // 2


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_rank_reads_its_own_parts_of_each_tensor(families, layout, name):
    found = families[2, f"counted_{layout}_{name}"]
    tensors = tensors_of(families.folder / name.removesuffix("_fused"))
    assert found.keys() == tensors.keys() | {"before", "parameters", "peak"}
    for key, tensor in tensors.items():
        expected = [own_bytes(layout, key, tuple(tensor.shape), rank, tied="lm_head.weight" not in tensors) for rank in (0, 1)]
        assert found[key].tolist() == expected, key


@pytest.mark.parametrize("layout", ["tensor", "stages"])
def test_a_rank_holds_no_more_than_it_reads(families, layout):
    """But for the rows that pad a vocabulary."""
    found = families[2, f"counted_{layout}_large"]
    read = sum(values for key, values in found.items() if key.endswith(".weight"))
    for rank in (0, 1):
        assert 0 <= found["parameters"][rank] - read[rank] <= 2 * 512 * 4 * (layout == "tensor")
        assert read[rank] > 16e6
        assert found["peak"][rank] - found["before"][rank] < 0.1 * found["parameters"][rank]
