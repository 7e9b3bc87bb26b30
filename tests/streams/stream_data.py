"""Rollouts to write and read."""

import numpy as np

from prl.flow.versions import Version
from prl.streams.records import Group, Rollout, Turn, VersionSpan


def make_turn(rng: np.random.Generator, prompt: int, output: int, cuts=(), finish="stop") -> Turn:
    ends = [*cuts, output]
    spans = [VersionSpan(Version(0, 3 + i), a, b) for i, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]
    return Turn(
        rng.integers(0, 1000, prompt).astype(np.int32),
        rng.integers(0, 1000, output).astype(np.int32),
        rng.normal(size=output).astype(np.float32),
        tuple(spans),
        finish,
        2,
        1.5,
        2.5,
    )


def make_group(number: int, rng: np.random.Generator, rollouts=2, turns=1, issue=0) -> Group:
    def rollout(k: int) -> Rollout:
        made = tuple(make_turn(rng, int(rng.integers(0, 5)), 4, cuts=(1,) if k % 2 else ()) for _ in range(turns + k % 2))
        return Rollout(made, float(np.float32(rng.normal())), {"length": float(k), "ü": 0.5} if k else {})

    return Group(1, "digits", "set", f"digits/{number}", number, issue, tuple(rollout(k) for k in range(rollouts)))


def assert_equal(found: list[Group], wanted: list[Group]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        for name in ("epoch", "domain", "dataset", "problem", "group", "issue", "numbers"):
            assert getattr(a, name) == getattr(b, name)
        assert len(a.rollouts) == len(b.rollouts)
        for r, s in zip(a.rollouts, b.rollouts, strict=True):
            assert (r.reward, dict(r.metrics), len(r.turns)) == (s.reward, dict(s.metrics), len(s.turns))
            for t, u in zip(r.turns, s.turns, strict=True):
                for name in ("prompt_ids", "output_ids", "logprobs"):
                    x, y = getattr(t, name), getattr(u, name)
                    assert x.dtype == y.dtype
                    np.testing.assert_array_equal(x, y)
                for name in ("versions", "finish_reason", "replica", "started", "ended"):
                    assert getattr(t, name) == getattr(u, name)
