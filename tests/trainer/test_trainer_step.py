"""Optimizer steps: against transformers and autograd, over ranks and splits, through checkpoints."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_data import LENGTHS, facts, merged, microbatches, rewarded
from transformers import AutoModelForCausalLM

GRADIENT_TOLERANCE = 1e-5


def losses(found, *steps):
    return np.array([found[f"{step}:train/loss"] for step in steps])


def gradients(found):
    return {name: values for name, values in found.items() if name.startswith(("model.", "lm_head."))}


def assert_equal_steps(found, expected):
    assert abs(losses(found, 1) - losses(expected, 1)) < 1e-5
    theirs = gradients(expected)
    assert gradients(found).keys() == theirs.keys()
    for name, values in gradients(found).items():
        np.testing.assert_allclose(values, theirs[name], atol=GRADIENT_TOLERANCE, err_msg=name)


def decay_of_matrices(model):
    return [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is matrix], "weight_decay": 0.01 * matrix}
        for matrix in (False, True)
    ]


def written_out(model, batch, loss_kind, proximal=None, kl_coefficient=0.1):
    """Loss and measures of all sequences by the formulas, one sequence and one token at a time."""
    total, entropies, ratios, divergences = torch.zeros(()), [], [], []
    for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        logp = model(tokens[None]).logits[0].log_softmax(-1)
        for t in range(1, end - start):
            weight = float(batch.loss_weights[start + t])
            if weight == 0:
                continue
            pi = logp[t - 1, tokens[t]]
            advantage, mu = float(batch.advantages[start + t]), float(batch.old_logprobs[start + t])
            ratio = (pi - mu).exp()
            if loss_kind == "ppo":
                term = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            elif loss_kind == "decoupled_ppo":
                own, recent = (pi - float(proximal[start + t])).exp(), np.exp(float(proximal[start + t]) - mu)
                term = -min(recent, 5.0) * torch.minimum(own * advantage, own.clamp(0.8, 1.2) * advantage)
            else:
                term = -pi * advantage * min(float(ratio.detach()), 1.1)
            x = float(batch.reference_logprobs[start + t]) - pi
            entropy = -(logp[t - 1].exp() * logp[t - 1]).sum()
            divergence = x.exp() - x - 1
            total = total + weight * (term - 0.01 * entropy + kl_coefficient * divergence)
            divergences.append(float(divergence.detach()))
            entropies.append(float(entropy.detach()))
            ratios.append(float(ratio.detach()))
    return total / facts(1).denominator, np.array(entropies), np.array(ratios), np.array(divergences)


@pytest.mark.parametrize(("name", "loss_kind"), [("step", "ppo"), ("step_reinforce", "reinforce")])
def test_loss_gradient_and_measures_equal_the_formulas(results, name, loss_kind):
    found = results[1, name]
    model = AutoModelForCausalLM.from_pretrained(results.folder / "qwen3", dtype=torch.float32)
    batch = merged(microbatches())
    loss, entropies, ratios, divergences = written_out(model, batch, loss_kind)
    loss.backward()
    assert abs(losses(found, 1) - float(loss.detach())) < 1e-5
    expected = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    assert gradients(found).keys() == expected.keys()
    for key, values in gradients(found).items():
        np.testing.assert_allclose(values, expected[key], atol=GRADIENT_TOLERANCE, err_msg=key)
    norm = np.sqrt(sum((values.astype(np.float64) ** 2).sum() for values in expected.values()))

    trained = batch.loss_weights > 0
    lags = batch.lags[trained]
    advantages = batch.advantages[trained]
    outside = ((advantages > 0) & (ratios > 1.2)) | ((advantages < 0) & (ratios < 0.8))
    clipped = outside if loss_kind == "ppo" else ratios > 1.1
    measured = {
        "grad_norm": norm,
        "tokens": trained.sum(),
        "entropy": entropies.mean(),
        "ratio_mean": ratios.mean(),
        "ratio_max": ratios.max(),
        "clip_fraction": clipped.mean(),
        "ess": ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()),
        "mismatch_mean_nats": np.abs(np.log(ratios)).mean(),
        "mismatch_max_nats": np.abs(np.log(ratios)).max(),
        "mismatch_k3_nats": (ratios - np.log(ratios) - 1).mean(),
        "kl": divergences.mean(),
        "lag_mean": lags.mean(),
        "lag_max": lags.max(),
    }
    measured |= {f"lag_{lag}": (lags == lag).sum() for lag in np.unique(lags)}
    assert sum(key.startswith("1:train/lag_") for key in found) == len(np.unique(lags)) + 2
    for key, value in measured.items():
        assert float(found[f"1:train/{key}"]) == pytest.approx(float(value), rel=1e-4), key


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fresh_value_head_is_nought_and_draws_to_the_rewards_from_the_states_before_each_token(results, ranks):
    found = results[ranks, "step_values"]
    model = AutoModelForCausalLM.from_pretrained(results.folder / "qwen3", dtype=torch.float32)
    batch = merged(rewarded())
    loss, _, _, _ = written_out(model, batch, "ppo")  # with values of 0 advantages are the rewards
    loss.backward()
    expected, returns = np.zeros(model.config.hidden_size), []
    for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        states = model(tokens[None], output_hidden_states=True).hidden_states[-1][0].detach().numpy()
        for t in np.flatnonzero(batch.loss_weights[start:end]):
            weight, reward = batch.loss_weights[start + t], batch.advantages[start + t]
            expected -= 0.5 * weight / facts(1).denominator * reward * states[t - 1]
            returns.append((weight, reward))
    np.testing.assert_allclose(found["value_head"], expected, atol=GRADIENT_TOLERANCE)
    for key, parameter in model.named_parameters():
        np.testing.assert_allclose(found[key], parameter.grad.numpy(), atol=GRADIENT_TOLERANCE, err_msg=key)
    value_loss = sum(weight * reward**2 for weight, reward in returns) / 4 / facts(1).denominator
    assert found["1:train/loss_value"] == pytest.approx(value_loss, rel=1e-5)
    assert losses(found, 1) == pytest.approx(float(loss.detach()) + value_loss, abs=1e-5)
    assert found["1:train/value_mean"] == 0
    assert found["1:train/explained_variance"] == pytest.approx(0, abs=1e-9)


def test_a_value_head_learns_the_rewards(results):
    found = results[1, "step_values"]
    explained, values = (
        [float(found[f"{step}:train/{name}"]) for step in range(1, 26)] for name in ("explained_variance", "value_mean")
    )
    rewards = [reward for batch in rewarded() for reward in batch.advantages[batch.loss_weights > 0]]
    assert explained[-1] > 0.9
    assert values[-1] == pytest.approx(np.mean(rewards), abs=0.1)
    assert found["25:train/loss_value"] < 0.1 * found["1:train/loss_value"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_output_layer_of_its_own_has_its_gradient(results, ranks):
    found = results[ranks, "step_untied"]
    model = AutoModelForCausalLM.from_pretrained(results.folder / "llama", dtype=torch.float32)
    loss, _, _, _ = written_out(model, merged(microbatches()), "ppo")
    loss.backward()
    assert abs(losses(found, 1) - float(loss.detach())) < 1e-5
    for key, parameter in model.named_parameters():
        np.testing.assert_allclose(found[key], parameter.grad.numpy(), atol=GRADIENT_TOLERANCE, err_msg=key)


@pytest.mark.parametrize(("ranks", "name"), [(1, "decay"), (2, "decay"), (2, "decay_shared")])
def test_matrices_decay_but_norms_and_biases_do_not(results, ranks, name):
    """Without a gradient, at a rate of 0.1 and a decay of 0.5: by exactly the twentieth part."""
    found = results[ranks, name]
    start, end = (
        {key.removeprefix(when): values for key, values in found.items() if key.startswith(when)} for when in ("start:", "end:")
    )
    still = {key for key in start if "norm" in key or key.endswith(".bias")}
    assert sum(key.endswith(".bias") for key in still) == 3 * 2
    assert sum("norm" in key for key in still) == 2 * 2 + 1
    for key, values in start.items():
        assert np.abs(values).max() > 0.1
        if key in still:
            assert np.array_equal(end[key], values), key
        else:
            np.testing.assert_allclose(end[key], 0.95 * values, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_whose_tokens_a_mask_leaves_out_changes_nothing_and_is_not_skipped(results, ranks):
    found = results[ranks, "all_masked"]
    assert found["train/mask_fraction"] == 1
    assert found["train/tokens"] == 50
    assert found["train/loss"] == found["train/grad_norm"] == found["train/skipped"] == 0
    assert found["same"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_clipping_warm_up_and_decay_equal_a_plain_loop(results, ranks):
    """torch's own AdamW on transformers' model: rates 0.005, 0.01, 0.01; decay of matrices alone; norm clipped at 0.05."""
    found = results[ranks, "step_scheduled"]
    model = AutoModelForCausalLM.from_pretrained(results.folder / "qwen3", dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-4)
    batch = merged(microbatches())
    expected = []
    for rate in (0.005, 0.01, 0.01):
        optimizer.zero_grad()
        loss, _, _, _ = written_out(model, batch, "ppo")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.1
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        expected.append((float(loss.detach()), float(norm)))
    measured = [(float(found[f"{step}:train/loss"]), float(found[f"{step}:train/grad_norm"])) for step in (1, 2, 3)]
    np.testing.assert_allclose(measured, expected, rtol=1e-4)


def initial_logprobs(results, batch):
    """log p of each token [T] by transformers' initial model; 0 for the first token of a sequence."""
    return logprobs_of(AutoModelForCausalLM.from_pretrained(results.folder / "qwen3", dtype=torch.float32), batch)


def logprobs_of(model, batch):
    found = np.zeros(len(batch.tokens), np.float32)
    for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            logp = model(tokens[None]).logits[0].log_softmax(-1)
        found[start + 1 : end] = logp[:-1].gather(-1, tokens[1:, None])[:, 0].numpy()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_at_the_first_step_the_divergence_is_nought_and_changes_nothing(results, ranks):
    found, plain = results[ranks, "step_reference"], results[ranks, "step_without_kl"]
    assert found["1:train/kl"] == 0
    assert found["1:train/loss"] == plain["1:train/loss"]
    # With ranks that split the model the two may round differently, by up to 5e-7 a log-prob.
    assert found["1:train/grad_norm"] == pytest.approx(float(plain["1:train/grad_norm"]), rel=1e-6)
    assert "1:train/kl" not in plain


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_divergence_from_the_initial_policy_equals_a_plain_loop(results, ranks):
    """torch's own AdamW on transformers' model, whose first weights judge the later ones, with a weight that rises."""
    found = results[ranks, "step_reference"]
    model = AutoModelForCausalLM.from_pretrained(results.folder / "qwen3", dtype=torch.float32)
    optimizer = torch.optim.AdamW(decay_of_matrices(model), lr=1e-3, betas=(0.9, 0.95))
    batch = merged(microbatches())
    batch = replace(batch, reference_logprobs=initial_logprobs(results, batch))
    weights = batch.loss_weights[batch.loss_weights > 0] / facts(1).denominator
    for step, coefficient in ((1, 0.1), (2, 5.1), (3, 10.1)):
        optimizer.zero_grad()
        loss, _, _, divergences = written_out(model, batch, "ppo", kl_coefficient=coefficient)
        loss.backward()
        optimizer.step()
        assert found[f"{step}:train/loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
        assert found[f"{step}:train/kl"] == pytest.approx(divergences.mean(), rel=1e-2, abs=1e-9)
        assert found[f"{step}:train/kl_coefficient"] == pytest.approx(coefficient)
        in_loss = coefficient * (weights * divergences).sum()
        assert found[f"{step}:train/loss_kl"] == pytest.approx(in_loss, rel=1e-2, abs=1e-8)
    assert in_loss > 1e-4  # so that the losses see it, too


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_proximal_policy_is_that_of_the_step_before(results, ranks):
    """torch's own AdamW on transformers' model, which judges each step's tokens before it changes."""
    found = results[ranks, "step_proximal"]
    model = AutoModelForCausalLM.from_pretrained(results.folder / "qwen3", dtype=torch.float32)
    optimizer = torch.optim.AdamW(decay_of_matrices(model), lr=1e-3, betas=(0.9, 0.95))
    batch = merged(microbatches())
    proximal = logprobs_of(model, batch)  # in the first step the trainer's own
    for step in (1, 2, 3):
        optimizer.zero_grad()
        loss, _, _, _ = written_out(model, batch, "decoupled_ppo", proximal)
        loss.backward()
        proximal = logprobs_of(model, batch)
        optimizer.step()
        assert found[f"{step}:train/loss"] == pytest.approx(float(loss.detach()), abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_stays_and_is_built_again_bit_for_bit(results, ranks):
    found = results[ranks, "frozen"]
    batch = merged(microbatches())
    later = np.flatnonzero(batch.positions > 0)  # each predicted by the token before it
    np.testing.assert_allclose(found["kept"][later - 1], initial_logprobs(results, batch)[later], atol=1e-4)
    assert np.array_equal(found["kept"], found["again"])
    assert found["kept_digest"] == found["again_digest"] == found["weights_digest"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probs_of_the_step_file_go_before_those_of_the_reference(results, ranks):
    found, expected = results[ranks, "step_own_logprobs"], results[ranks, "step"]
    assert found["1:train/loss"] == expected["1:train/loss"]


def test_a_checkpoint_knows_the_reference(results):
    found = results[2, "checkpoint"]
    assert found["same_reference"] == "loaded"
    assert re.search(
        r"built again as the reference, has the digest 5; it was \d+ when .*step_000002", str(found["other_reference"])
    )


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, "step_reference"), (2, "step_reference_sequence_parallel"), (2, "step_reference_one_rank_idle")],
)
def test_the_divergence_does_not_depend_on_ranks_or_micro_batches(results, ranks, name):
    found, expected = results[ranks, name], results[1, "step_reference"]
    assert_equal_steps(found, expected)
    np.testing.assert_allclose(losses(found, 1, 2, 3), losses(expected, 1, 2, 3), atol=1e-5)
    for step in (1, 2, 3):
        assert found[f"{step}:train/kl"] == pytest.approx(float(expected[f"{step}:train/kl"]), abs=1e-5)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (2, "step"),
        (2, "step_sequence_parallel"),
        (2, "step_two_data_ranks"),
        (2, "step_one_rank_idle"),
        (1, "step_merged"),
        (2, "step_merged"),
        (1, "step_recomputed"),
        (2, "step_recomputed_selectively"),
    ],
)
def test_step_does_not_depend_on_ranks_or_micro_batches(results, ranks, name):
    assert_equal_steps(results[ranks, name], results[1, "step"])


@pytest.mark.parametrize(("ranks", "name"), [(1, "step_sequences_merged"), (2, "step_sequences"), (2, "step_sequences_merged")])
def test_losses_of_whole_sequences_do_not_depend_on_ranks_or_micro_batches(results, ranks, name):
    found, expected = results[ranks, name], results[1, "step_sequences"]
    assert_equal_steps(found, expected)
    for key in ("1:train/mask_fraction", "1:train/clip_fraction"):
        assert 0 < found[key] < 1
        assert found[key] == pytest.approx(float(expected[key]))


@pytest.mark.parametrize("name", ["step", "step_two_data_ranks"])
def test_later_steps_stay_together(results, name):
    np.testing.assert_allclose(losses(results[2, name], 1, 2, 3), losses(results[1, "step"], 1, 2, 3), atol=1e-5)
    assert len(set(losses(results[1, "step"], 1, 2, 3))) == 3  # and the steps do something


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(results, ranks):
    found = results[ranks, "checkpoint"]
    assert np.array_equal(found["resumed"], found["went_on"])


def test_checkpoint_may_be_resumed_with_other_tensor_parallelism(results):
    resumed, went_on = results[2, "checkpoint"]["resumed_from_one"], results[1, "checkpoint"]["went_on"]
    np.testing.assert_allclose(resumed[:, 0], went_on[:, 0], atol=1e-5)
    np.testing.assert_allclose(resumed[:, 1], went_on[:, 1], rtol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_half_precision_is_near(results, ranks):
    half, full = results[ranks, "bfloat16"], results[1, "step"]
    assert float(half["train/loss"]) == pytest.approx(float(full["1:train/loss"]), abs=0.05)
    assert float(half["train/grad_norm"]) == pytest.approx(float(full["1:train/grad_norm"]), rel=0.1)


def test_the_data_are_as_the_tests_mean_them():
    batch = merged(microbatches())
    assert len(batch.boundaries) == 1 + sum(map(len, LENGTHS))
    assert (batch.loss_weights[batch.boundaries[:-1]] == 0).all()
    assert facts(1).denominator == pytest.approx(batch.loss_weights.sum())
