"""Every loss and its gradient against loops in NumPy's float64, whose gradients are differences of the loss itself."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prl.streams.records import MicroBatch, StepFacts
from prl.trainer.batch import Batch, to_device
from prl.trainer.losses import Sequences
from prl.trainer.objective import objective
from prl.trainer.options import LOSS_SETTINGS, TrainOptions

DENOMINATOR = 7.0
STEP = 3  # of 4 over which coefficients change: half of the way
DIFFERENCE = 1e-6
KINK = 1e-5  # a loss has no gradient where its branches meet

OPTIONS = {
    **{loss: {"loss": loss} for loss in LOSS_SETTINGS},
    "ppo_asymmetric": {"loss": "ppo", "clip_low": 0.1, "clip_high": 0.4},
    "gspo_wide": {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    "cispo_two_sided": {"loss": "cispo", "clip_low": 0.4, "clip_high": 0.6},
    "reinforce_truncated": {"loss": "reinforce", "truncate": 1.1},
    "decoupled_ppo_truncated": {"loss": "decoupled_ppo", "clip_low": 0.05, "clip_high": 0.1, "truncate": 1.2},
    "decoupled_ppo_previous": {"loss": "decoupled_ppo", "proximal": "previous"},
    "decoupled_ppo_previous_truncated": {
        "loss": "decoupled_ppo",
        "proximal": "previous",
        "clip_low": 0.05,
        "clip_high": 0.1,
        "truncate": 1.2,
        "token_mask_high": 1.5,
    },
    "dppo_tv_narrow": {"loss": "dppo_tv", "clip_low": 0.02, "clip_high": 0.03, "ratio_penalty": 0.1},
    "token_mask": {"loss": "reinforce", "token_mask_low": 0.7, "token_mask_high": 1.5},
    "sequence_mask": {"loss": "ppo", "sequence_mask_low": 0.9, "sequence_mask_high": 1.2},
    "both_masks": {"loss": "gspo", "clip_high": 0.4, "token_mask_high": 1.5, "sequence_mask_low": 0.8},
    "everything": {
        "loss": "dppo_tv",
        "token_mask_high": 3.0,
        "sequence_mask_low": 0.5,
        "entropy_coefficient": 0.02,
        "entropy_coefficient_end": 0.0,
        "kl_coefficient": 0.1,
        "kl_coefficient_end": 0.3,
        "coefficient_steps": 4,
    },
    **{
        f"{place}_{estimator}": {"loss": "reinforce", "kl_coefficient": 0.2, "kl_place": place, "kl_estimator": estimator}
        for place in ("loss", "reward")
        for estimator in ("k1", "k2", "k3", None)
    },
    "value_head": {"loss": "reinforce", "value_head": True},
    "value_head_one_step": {"loss": "cispo", "value_head": True, "gae_lambda": 0.0},
    "value_head_discounted": {
        "loss": "ppo",
        "value_head": True,
        "gae_gamma": 0.9,
        "gae_lambda": 0.8,
        "value_coefficient": 0.3,
        "entropy_coefficient": 0.02,
    },
    "value_head_divergence_in_reward": {
        "loss": "reinforce",
        "value_head": True,
        "gae_lambda": 0.95,
        "kl_coefficient": 0.2,
        "kl_place": "reward",
    },
}


@dataclass(frozen=True)
class Tokens:
    """One packed row, as the losses see it; float64."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    proximal_logprobs: np.ndarray | None  # of a policy that is neither the trainer's nor the sampler's; None: not known yet
    reference_logprobs: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    lags: np.ndarray
    values: np.ndarray
    lengths: tuple[int, ...]

    @property
    def sequence_of_token(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def some_tokens(seed: int, lengths: tuple[int, ...], spread: float = 0.3) -> Tokens:
    random = np.random.default_rng(seed)
    count = sum(lengths)
    logprobs = -random.exponential(1.0, count)
    return Tokens(
        logprobs=logprobs,
        old_logprobs=np.minimum(logprobs + random.normal(0, spread, count), 0.0),
        reference_logprobs=np.minimum(logprobs + random.normal(0, 1.0, count), 0.0),
        entropies=random.exponential(1.0, count),
        advantages=random.normal(0, 1, count),
        weights=random.choice([0.0, 0.25, 1.0], count),
        lags=random.integers(0, 5, count).astype(float),
        values=random.normal(0, 1, count),
        proximal_logprobs=np.minimum(logprobs + random.normal(0, spread / 2, count), 0.0),
        lengths=lengths,
    )


BASE = some_tokens(0, (4, 1, 6, 3))
FIRST = np.arange(14) == 2
ONES = np.ones(14)
CASES = {
    "random": BASE,
    "far apart": some_tokens(1, (5, 7), spread=3.0),
    "one token": replace(some_tokens(2, (1,)), weights=np.ones(1)),
    "one token in each sequence": replace(some_tokens(3, (1,) * 6), weights=np.ones(6)),
    "nothing trains": replace(BASE, weights=np.zeros(14)),
    "one sequence trains": replace(BASE, weights=(BASE.sequence_of_token == 2) * 0.5),
    "on-policy": replace(BASE, old_logprobs=BASE.logprobs.copy(), lags=np.zeros(14)),
    "lag 0": replace(BASE, lags=np.zeros(14)),
    "lag 1": replace(BASE, lags=np.ones(14)),
    "no advantage": replace(BASE, advantages=np.zeros(14)),
    "infinite ratio, good": replace(
        BASE, weights=ONES, old_logprobs=np.where(FIRST, -np.inf, BASE.old_logprobs), advantages=np.abs(BASE.advantages)
    ),
    "infinite ratio, bad": replace(
        BASE, weights=ONES, old_logprobs=np.where(FIRST, -np.inf, BASE.old_logprobs), advantages=-np.abs(BASE.advantages)
    ),
    "ratio nought": replace(BASE, weights=ONES, logprobs=np.where(FIRST, -5000.0, BASE.logprobs)),
    "unknown where nothing trains": replace(
        BASE, weights=np.where(FIRST, 0.0, 1.0), old_logprobs=np.where(FIRST, np.inf, BASE.old_logprobs)
    ),
    "above every mask": replace(BASE, old_logprobs=BASE.logprobs - 2.0),
    "below every mask": replace(BASE, logprobs=BASE.old_logprobs - 2.0),
}


def bounded(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


def log_ratio(a: float, b: float, weight: float) -> float:
    return bounded(a - b, 20.0) if weight > 0 else 0.0


def estimate(estimator: str, policy: float, reference: float) -> float:
    x = bounded(reference - policy, 10.0)
    return {"k1": -x, "k2": x * x / 2, "k3": np.exp(x) - x - 1}[estimator]


class Written:
    """The loss by its formulas, a token at a time. What carries no gradient is of `fixed`, the rest of the log-probs given."""

    def __init__(self, tokens: Tokens, options: TrainOptions, fixed: np.ndarray) -> None:
        self.tokens, self.options, self.fixed = tokens, options, fixed
        setting = {**LOSS_SETTINGS[options.loss]}
        setting |= {name: getattr(options, name) for name in setting if getattr(options, name) is not None}
        self.low, self.high = setting.get("clip_low", 0.0), setting.get("clip_high", 0.0)
        self.truncate, self.penalty = setting.get("truncate", 0.0), setting.get("ratio_penalty", 0.0)
        changed = 0.0 if options.coefficient_steps is None else (STEP - 1) / options.coefficient_steps
        ends = (options.kl_coefficient_end, options.entropy_coefficient_end)
        starts = (options.kl_coefficient, options.entropy_coefficient)
        self.kl, self.entropy = (
            start if end is None else (1 - changed) * start + changed * end for start, end in zip(starts, ends, strict=True)
        )
        self.estimator = options.kl_estimator or {"reward": "k1", "loss": "k3"}[options.kl_place]
        self.nearest_kink = np.inf
        self.clipped = np.zeros(len(fixed), bool)
        self.means = [self.mean_log_ratio(sequence) for sequence in range(len(tokens.lengths))]
        self.masked = np.array([self.is_masked(u) for u in range(len(fixed))])
        self.advantages = [self.advantage(u) for u in range(len(fixed))]

    def mean_log_ratio(self, sequence: int) -> float:
        t = self.tokens
        values = [
            log_ratio(self.fixed[u], t.old_logprobs[u], t.weights[u])
            for u in np.flatnonzero((t.sequence_of_token == sequence) & (t.weights > 0))
        ]
        return sum(values) / len(values) if values else 0.0

    def is_masked(self, u: int) -> bool:
        o, t = self.options, self.tokens
        ratio = np.exp(log_ratio(self.fixed[u], t.old_logprobs[u], t.weights[u]))
        whole = np.exp(self.means[t.sequence_of_token[u]])
        bounds = [(ratio, o.token_mask_low, o.token_mask_high), (whole, o.sequence_mask_low, o.sequence_mask_high)]
        return any((low is not None and r < low) or (high is not None and r > high) for r, low, high in bounds)

    def advantage(self, u: int) -> float:
        t = self.tokens
        if self.options.value_head:
            return self.of_values(u)
        if not self.kl or self.options.kl_place == "loss":
            return t.advantages[u]
        later = range(u, int(np.cumsum(t.lengths)[t.sequence_of_token[u]]))
        return t.advantages[u] - self.kl * sum(
            estimate(self.estimator, self.fixed[v], t.reference_logprobs[v]) for v in later if t.weights[v] > 0
        )

    def of_values(self, u: int) -> float:
        """GAE by its definition, over the trained tokens from u to the end of its sequence."""
        o, t = self.options, self.tokens
        in_sequence = t.sequence_of_token == t.sequence_of_token[u]
        later = np.flatnonzero(in_sequence & (t.weights > 0) & (np.arange(len(t.weights)) >= u))
        total = 0.0
        for k, v in enumerate(later):
            reward, following = (t.advantages[v], 0.0) if v == later[-1] else (0.0, t.values[later[k + 1]])
            if self.kl and o.kl_place == "reward":
                reward -= self.kl * estimate(self.estimator, self.fixed[v], t.reference_logprobs[v])
            total += (o.gae_gamma * o.gae_lambda) ** k * (reward + o.gae_gamma * following - t.values[v])
        if t.weights[u] > 0 and abs(total) < 1e-9:  # it may have either sign
            self.nearest_kink = 0.0
        return total

    def clipped_ratio(self, u: int, log_r: float, advantage: float) -> float:
        r = np.exp(log_r)
        lower, upper = 1 - self.low, 1 + self.high
        self.clipped[u] = (advantage > 0 and r > upper) or (advantage < 0 and r < lower)
        self.nearest_kink = min(self.nearest_kink, abs(r - lower), abs(r - upper))
        return min(r * advantage, min(max(r, lower), upper) * advantage)

    def policy(self, u: int, pi: float) -> float:
        """The policy loss of a token."""
        t, loss = self.tokens, self.options.loss
        mu, fixed, weight = t.old_logprobs[u], self.fixed[u], t.weights[u]
        log_rho, fixed_log_rho = log_ratio(pi, mu, weight), log_ratio(fixed, mu, weight)
        self.nearest_kink = min(self.nearest_kink, abs(abs(pi - mu) - 20) if weight > 0 else np.inf)
        advantage = self.advantages[u]
        if loss == "sft":
            return -pi
        if loss == "reinforce":
            self.clipped[u] = np.exp(fixed_log_rho) > self.truncate
            return -min(np.exp(fixed_log_rho), self.truncate) * advantage * pi
        if loss == "cispo":
            held = min(max(np.exp(fixed_log_rho), 1 - self.low), 1 + self.high)
            self.clipped[u] = held != np.exp(fixed_log_rho)
            return -held * advantage * pi
        if loss == "ppo":
            return -self.clipped_ratio(u, log_rho, advantage)
        if loss == "gspo":
            return -self.clipped_ratio(u, self.means[t.sequence_of_token[u]] + log_rho - fixed_log_rho, advantage)
        if loss == "dppo_tv":
            moved = np.exp(fixed) - np.exp(mu)
            self.clipped[u] = moved > self.high if advantage > 0 else moved < -self.low
            return 0.0 if self.clipped[u] else -np.exp(log_rho) * advantage
        if self.options.proximal == "previous":
            proximal = t.proximal_logprobs[u]
        else:
            proximal = fixed if t.lags[u] == 0 else fixed - fixed_log_rho / t.lags[u]
        behaviour = np.exp(log_ratio(proximal, mu, weight))
        self.nearest_kink = min(self.nearest_kink, abs(abs(pi - proximal) - 20))
        inner = self.clipped_ratio(u, log_ratio(pi, proximal, weight), advantage)
        self.clipped[u] |= behaviour > self.truncate
        return -min(behaviour, self.truncate) * inner

    def loss(self, logprobs: np.ndarray, entropies: np.ndarray, values: np.ndarray) -> float:
        t, total = self.tokens, 0.0
        for u in np.flatnonzero(t.weights > 0):
            pi = logprobs[u]
            value = self.policy(u, pi)
            token = 0.0 if self.masked[u] else value
            token += self.penalty * log_ratio(pi, t.old_logprobs[u], t.weights[u]) ** 2
            token -= self.entropy * entropies[u]
            if self.options.kl_place == "loss" and self.kl:
                token += self.kl * estimate(self.estimator, pi, t.reference_logprobs[u])
                self.nearest_kink = min(self.nearest_kink, abs(abs(t.reference_logprobs[u] - pi) - 10))
            if self.options.value_head:
                token += self.options.value_coefficient * (values[u] - (self.advantages[u] + t.values[u])) ** 2 / 2
            total += t.weights[u] * token
        return total / DENOMINATOR


def slope(function, values: np.ndarray) -> np.ndarray:
    """Central differences."""
    found = np.zeros(len(values))
    for u in range(len(values)):
        step = np.zeros(len(values))
        step[u] = DIFFERENCE
        found[u] = (function(values + step) - function(values - step)) / (2 * DIFFERENCE)
    return found


def batch_of(tokens: Tokens, dtype: torch.dtype) -> Batch:
    count = len(tokens.weights)
    nothing = torch.zeros(count, dtype=torch.int64)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return Batch(
        tokens=nothing,
        positions=nothing,
        targets=nothing,
        sequences=None,
        cut=None,
        weights=tensor(tokens.weights),
        advantages=tensor(tokens.advantages),
        old_logprobs=tensor(tokens.old_logprobs),
        reference_logprobs=tensor(tokens.reference_logprobs),
        proximal_logprobs=None if tokens.proximal_logprobs is None else tensor(tokens.proximal_logprobs),
        lags=tensor(tokens.lags),
        sequence_numbers=Sequences(torch.from_numpy(tokens.sequence_of_token), len(tokens.lengths)),
    )


def computed(tokens: Tokens, options: TrainOptions, dtype: torch.dtype = torch.float64):
    """The objective, and the gradients to log-probs, entropies and values."""
    logprobs = torch.tensor(tokens.logprobs, dtype=dtype, requires_grad=True)
    entropies = torch.tensor(tokens.entropies, dtype=dtype, requires_grad=True)
    values = torch.tensor(tokens.values, dtype=dtype, requires_grad=True) if options.value_head else None
    found = objective(batch_of(tokens, dtype), logprobs, entropies, StepFacts(STEP, DENOMINATOR, 1, 1, 1), options, values)
    found.loss.backward()
    nothing = np.zeros(len(tokens.weights))
    others = [nothing if x is None or x.grad is None else x.grad.numpy() for x in (entropies, values)]
    return found, logprobs.grad.numpy(), *others


def on_a_kink(tokens: Tokens, options: TrainOptions) -> bool:
    written = Written(tokens, options, tokens.logprobs)
    written.loss(tokens.logprobs, tokens.entropies, tokens.values)
    return bool(written.nearest_kink < KINK)


def assert_as_written(tokens: Tokens, options: TrainOptions) -> None:
    written = Written(tokens, options, tokens.logprobs)
    loss = written.loss(tokens.logprobs, tokens.entropies, tokens.values)
    clipped = written.clipped.copy()
    assert written.nearest_kink > KINK
    gradient = slope(lambda pi: written.loss(pi, tokens.entropies, tokens.values), tokens.logprobs)
    to_values = slope(lambda values: written.loss(tokens.logprobs, tokens.entropies, values), tokens.values)
    found, of_logprobs, of_entropies, of_values = computed(tokens, options)
    trained = tokens.weights > 0
    assert float(found.loss.detach()) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(of_logprobs, gradient, rtol=1e-5, atol=1e-8 + 1e-9 * max(abs(loss), np.abs(gradient).max()))
    np.testing.assert_allclose(of_values, to_values, rtol=1e-5, atol=1e-8 + 1e-9 * abs(loss))
    np.testing.assert_allclose(of_entropies, -written.entropy * tokens.weights / DENOMINATOR, rtol=1e-12)
    assert np.array_equal(found.clipped.numpy()[trained], clipped[trained])
    assert np.array_equal(found.masked.numpy()[trained], written.masked[trained])
    assert np.isfinite(loss)
    assert np.isfinite(of_logprobs).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradient(options):
    for name, tokens in CASES.items():
        try:
            assert_as_written(tokens, TrainOptions(**options))
        except AssertionError as error:
            raise AssertionError(f"case: {name}") from error


SPECIAL = st.sampled_from([-5000.0, -100.0, -20.5, -3.0, -0.1, -1e-7])
LOGPROB = st.one_of(SPECIAL, st.floats(-8.0, -1e-6))


@st.composite
def any_tokens(draw) -> Tokens:
    lengths = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = sum(lengths)

    def values(strategy):
        return np.array(draw(st.lists(strategy, min_size=count, max_size=count)))

    return Tokens(
        logprobs=values(LOGPROB),
        old_logprobs=values(st.one_of(LOGPROB, st.just(-np.inf))),
        proximal_logprobs=values(LOGPROB),
        reference_logprobs=values(LOGPROB),
        entropies=values(st.floats(0.0, 10.0)),
        advantages=values(st.one_of(st.just(0.0), st.floats(-3.0, 3.0))),
        weights=values(st.sampled_from([0.0, 0.125, 1.0])),
        lags=values(st.integers(0, 4)).astype(float),
        values=values(st.floats(-2.0, 2.0)),
        lengths=lengths,
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(tokens=any_tokens())
def test_loss_and_gradient_of_any_tokens(options, tokens):
    assume(not on_a_kink(tokens, TrainOptions(**options)))
    assert_as_written(tokens, TrainOptions(**options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_half_as_many_digits_change_little(options):
    """Trainers compute in float32."""
    options = TrainOptions(**options)
    for name, tokens in CASES.items():
        full, gradient, _, of_values = computed(tokens, options)
        half, rough, _, of_rough = computed(tokens, options, torch.float32)
        assert float(half.loss.detach()) == pytest.approx(float(full.loss.detach()), rel=1e-4, abs=1e-5), name
        np.testing.assert_allclose(rough, gradient, rtol=1e-4, atol=1e-5 + 1e-6 * np.abs(gradient).max(), err_msg=name)
        np.testing.assert_allclose(of_rough, of_values, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_micro_batches_add_up(options):
    """Loss and gradient of whole sequences, however they are dealt to micro-batches."""
    options = TrainOptions(**options)
    whole, gradient, _, of_values = computed(BASE, options)
    ends = np.cumsum(BASE.lengths)
    parts, gradients, to_values = [], [], []
    for first, last in ((0, 1), (1, 3), (3, 4)):
        rows = slice(ends[first] - BASE.lengths[first], ends[last - 1])
        arrays = {name: values[rows] for name, values in vars(BASE).items() if name != "lengths"}
        found, of_part, _, values_of_part = computed(Tokens(**arrays, lengths=BASE.lengths[first:last]), options)
        parts.append({name: float(value.detach()) for name, value in found.parts.items()})
        gradients.append(of_part)
        to_values.append(values_of_part)
    for name, value in whole.parts.items():
        assert sum(part[name] for part in parts) == pytest.approx(float(value.detach()), rel=1e-12, abs=1e-15)
    np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(np.concatenate(to_values), of_values, rtol=1e-10, atol=1e-15)


def test_a_sequence_ratio_of_equal_tokens_has_the_gradient_of_the_sequences_own():
    """GSPO's equation 5: -s A clipped, s = exp(mean of log rho), each sequence weighing 1."""
    lengths = (4, 2, 5)
    sequence = np.repeat(np.arange(3), lengths)
    advantages = np.array([1.5, -0.7, 0.3])
    tokens = replace(some_tokens(5, lengths), advantages=advantages[sequence], weights=1 / np.array(lengths, float)[sequence])

    def loss(pi):
        means = [(pi - tokens.old_logprobs)[sequence == s].mean() for s in range(3)]
        return -sum(min(np.exp(m) * a, np.clip(np.exp(m), 0.8, 1.3) * a) for m, a in zip(means, advantages, strict=True))

    found, gradient, *_ = computed(tokens, TrainOptions(loss="gspo", clip_low=0.2, clip_high=0.3))
    assert float(found.loss.detach()) * DENOMINATOR == pytest.approx(loss(tokens.logprobs))
    np.testing.assert_allclose(gradient * DENOMINATOR, slope(loss, tokens.logprobs), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((name, side) for name in ("token_mask", "sequence_mask", "both_masks") for side in ("above", "below")),
        ("decoupled_ppo_previous_truncated", "above"),
    ],
)
def test_masks_that_leave_out_every_token_leave_no_loss_and_no_gradient(name, side):
    far = {"above": {"old_logprobs": np.full(14, -np.inf)}, "below": {"logprobs": np.full(14, -5000.0)}}
    for tokens in (CASES[f"{side} every mask"], replace(BASE, **far[side])):
        for dtype in (torch.float64, torch.float32):
            found, gradient, *_ = computed(tokens, TrainOptions(**OPTIONS[name]), dtype)
            assert found.masked.numpy()[tokens.weights > 0].all()
            assert float(found.loss.detach()) == 0
            assert np.array_equal(gradient, np.zeros(14))


def test_at_lag_one_the_interpolated_proximal_policy_is_the_samplers():
    tokens = replace(BASE, lags=np.ones(14))
    decoupled, gradient, *_ = computed(tokens, TrainOptions(loss="decoupled_ppo"))
    plain, expected, *_ = computed(tokens, TrainOptions(loss="ppo"))
    assert float(decoupled.loss.detach()) == pytest.approx(float(plain.loss.detach()))
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)


def test_with_the_trainers_own_as_proximal_policy_the_gradient_is_that_of_truncated_reinforce():
    """As in a run's first step, when none before it is known."""
    first = replace(BASE, proximal_logprobs=None)
    _, gradient, *_ = computed(first, TrainOptions(loss="decoupled_ppo", proximal="previous", truncate=1.2))
    _, expected, *_ = computed(BASE, TrainOptions(loss="reinforce", truncate=1.2))
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)


def test_a_divergence_without_reference_is_refused():
    batch = replace(batch_of(BASE, torch.float64), reference_logprobs=None)
    values = torch.tensor(BASE.logprobs)
    with pytest.raises(ValueError, match=r"train\.kl_coefficient: the divergence weighs 0\.1 in this step"):
        objective(batch, values, values, StepFacts(1, 1.0, 1, 1, 1), TrainOptions(kl_coefficient=0.1))


def test_tokens_know_their_sequence():
    lengths = [3, 1, 4]
    boundaries = np.cumsum([0, *lengths]).astype(np.int32)
    values = np.zeros(8, np.float32)
    packed = MicroBatch(
        tokens=np.arange(8, dtype=np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        boundaries=boundaries,
        loss_weights=np.array([0, 0, 1, 0, 0, 1, 1, 1], np.float32),
        advantages=values,
        old_logprobs=values,
        reference_logprobs=None,
        lags=np.zeros(8, np.int32),
        rollouts=(),
    )
    batch = to_device(packed, 3)  # padded to 9 tokens by a sequence of its own
    assert batch.sequence_numbers.count == 4
    assert batch.sequence_numbers.of_token.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3]
    trained = batch.weights > 0
    assert batch.targets[trained].tolist() == [2, 5, 6, 7]
    assert batch.sequence_numbers.of_token[trained].tolist() == [0, 2, 2, 2]
