"""Log-probabilities and entropies from hidden states, and all gradients, against torch's on whole logits."""

import numpy as np
import pytest
import torch
from trainer_data import VOCABULARY

CHUNKS = (1, 4 * VOCABULARY, 1 << 20)  # one token a chunk; some, the last one shorter; all


def whole(found, dtype):
    """Log-probs, entropies and the gradients of hidden states and weight, from logits that are there at once."""
    hidden, weight = (torch.from_numpy(found[name]).to(dtype).requires_grad_() for name in ("hidden", "weight"))
    logp = (hidden @ weight[:VOCABULARY].t()).log_softmax(-1)
    logprobs = logp.gather(-1, torch.from_numpy(found["targets"])[:, None]).squeeze(-1)
    entropies = -(logp.exp() * logp).sum(-1)
    return hidden, weight, logprobs, entropies


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("name", "tolerance"), [("float64", 1e-12), ("float32", 1e-4)])
@pytest.mark.parametrize("kept", ["returned", "main_grad"])
def test_chunks_equal_whole_logits(results, ranks, chunk, name, tolerance, kept):
    found = results[ranks, "head"]
    hidden, weight, logprobs, entropies = whole(found, getattr(torch, name))
    factors = torch.from_numpy(found["factors"])
    (logprobs * factors + entropies * factors.flip(0)).sum().backward()
    expected = {
        "logprobs": logprobs.detach(),
        "entropies": entropies.detach(),
        "of_hidden": hidden.grad,
        "of_weight": weight.grad,
    }
    for part, values in expected.items():
        measured = found[f"{name}:{chunk}:{kept}:{part}"]
        assert measured.dtype == values.numpy().dtype
        np.testing.assert_allclose(measured, values.numpy(), atol=tolerance, err_msg=part)
    assert not found[f"{name}:{chunk}:{kept}:of_weight"][VOCABULARY:].any()  # padding takes no part


@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probs_alone(results, ranks):
    found = results[ranks, "head"]
    hidden, weight, logprobs, _ = whole(found, torch.float64)
    (logprobs * torch.from_numpy(found["factors"])).sum().backward()
    np.testing.assert_allclose(found["alone:of_hidden"], hidden.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(found["alone:of_weight"], weight.grad.numpy(), atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_float32_head_does_not_round_logits(results, ranks):
    found = results[ranks, "head"]
    half = {name: torch.from_numpy(found[name]).bfloat16().double().numpy() for name in ("hidden", "weight")}
    _, _, logprobs, entropies = whole({**found, **half}, torch.float64)
    expected = logprobs.detach().numpy()
    np.testing.assert_allclose(found["half:float32:logprobs"], expected, atol=1e-5)
    np.testing.assert_allclose(found["half:float32:entropies"], entropies.detach().numpy(), atol=1e-5)
    rounded = np.abs(found["half:same:logprobs"] - expected).max()
    assert 1e-3 < rounded < 0.1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("head_dtype", ["same", "float32"])
def test_log_probs_and_gradients_of_a_half_precision_model(results, ranks, head_dtype):
    """Against float64 from the same hidden states and weight."""
    found = {
        key.removeprefix(f"{head_dtype}:"): values
        for key, values in results[ranks, "head_digits"].items()
        if key.startswith(f"{head_dtype}:")
    }
    assert found["dtype:logprobs"] == found["dtype:entropies"] == "torch.float32"
    assert found["dtype:of_hidden"] == "torch.bfloat16"  # as the layers before go on with it
    assert found["exported"].tolist() == ["torch.bfloat16"]  # what samplers and exports get is rounded all the same
    hidden, weight, logprobs, entropies = whole(found, torch.float64)
    factors = torch.from_numpy(found["factors"])
    (logprobs * factors + entropies * factors.flip(0)).sum().backward()
    off = {
        part: np.abs(found[part] - expected).max()
        for part, expected in (("logprobs", logprobs.detach().numpy()), ("entropies", entropies.detach().numpy()))
    }
    if head_dtype == "float32":
        assert max(off.values()) < 1e-5
    else:
        assert 1e-3 < off["logprobs"] < 0.03
    for part, expected in (("of_hidden", hidden.grad.numpy()), ("of_weight", weight.grad.numpy())):
        largest = np.abs(expected).max()
        np.testing.assert_allclose(found[part], expected, atol=0.01 * largest, err_msg=part)


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_are_never_whole_in_memory(results, ranks):
    """2,048 tokens x 4,095 tokens of the vocabulary, of which a MiB holds 64 rows, in a step and in its output layer alone."""
    found = {key: int(value) for key, value in results[ranks, "head_memory"].items()}
    mib, columns = 2**20, -(-4095 // ranks)
    whole, hidden = 4 * 2048 * columns, 4 * 2048 * 16
    for name in ("chunks", "half"):
        assert found[f"{name}:head:peak"] < 3 * mib + 3 * hidden
        assert found[f"{name}:step:largest"] <= mib
        assert found[f"{name}:step:peak"] < whole / 2
    assert found["whole:head:largest"] == found["whole:step:largest"] == whole  # so it would be seen


def test_a_value_heads_gradient_in_half_precision_is_summed_in_float32(results):
    found = results[1, "head"]
    hidden, factors = (torch.from_numpy(found[name]).bfloat16().double().numpy() for name in ("hidden", "factors"))
    exact = sum(np.roll(factors, shift) @ hidden for shift in range(20))
    np.testing.assert_allclose(found["values:of_weight"], exact, rtol=1e-5, atol=1e-4)
    rounded = sum(torch.from_numpy(np.roll(factors, shift) @ hidden).bfloat16().double().numpy() for shift in range(20))
    assert np.abs(rounded - exact).max() > 1e-2  # so that the line above sees it
