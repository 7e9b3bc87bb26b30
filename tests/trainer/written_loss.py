"""Every loss by its formulas: loops in NumPy's float64, whose gradients are differences of the loss itself."""

import numpy as np
from loss_rows import DENOMINATOR, STEP, Tokens

from prl.trainer.options import LOSS_SETTINGS, TrainOptions

DIFFERENCE = 1e-6


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
