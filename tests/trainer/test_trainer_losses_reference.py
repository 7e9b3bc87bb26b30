"""Every loss and its gradient against its formulas (written_loss.py)."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loss_rows import CASES, DENOMINATOR, OPTIONS, Tokens, computed
from written_loss import Written, slope

from prl.trainer.options import TrainOptions

KINK = 1e-5  # a loss has no gradient where its branches meet
SPECIAL = st.sampled_from([-5000.0, -100.0, -20.5, -3.0, -0.1, -1e-7])
LOGPROB = st.one_of(SPECIAL, st.floats(-8.0, -1e-6))


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
