"""Which problem comes next: domains mixed by their weights, each going through its problems in an order of its own."""

import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


class DispatcherError(Exception):
    """A call that does not fit the state: a fault of the caller."""


@dataclass(frozen=True, slots=True)
class Draw:
    domain: str
    index: int
    epoch: int


class ProblemOrder:
    """An endless sequence of problems, or one that ends after `epochs` epochs of every domain. The weights, the sizes and the
    seed fix it; how many problems each domain has given says how far it has come.

    At every point each domain has given less than one problem more or fewer than its share (the quota method of Balinski and
    Young: of the domains that are below their share with the next draw, the one that would fall behind first). A domain that
    has given all its epochs leaves the others to share by their weights."""

    def __init__(self, weights: Mapping[str, float], seed: int, epochs: int | None = None) -> None:
        if not weights or min(weights.values()) <= 0:
            raise DispatcherError(f"every domain needs a weight above 0, at least one domain: {dict(weights)}")
        self.sizes: dict[str, int] = {}
        self._weights = dict(weights)
        self._seed = seed
        self._epochs = epochs
        self._drawn = dict.fromkeys(weights, 0)  # problems ever drawn from each domain
        self._permutations: dict[tuple[str, int], npt.NDArray[np.int64]] = {}

    def set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Problems of each domain. Raises where a domain has none, or where a resumed run finds other numbers than before."""
        missing = [d for d in self._weights if sizes.get(d, 0) < 1]
        if missing:
            raise DispatcherError(f"no problems to train on in domain {', '.join(missing)}")
        sizes = {d: int(sizes[d]) for d in self._weights}
        if self.sizes and sizes != self.sizes:
            raise DispatcherError(
                f"the problems have changed: {self.sizes} before, {sizes} now; their numbers would mean others"
            )
        self.sizes = sizes

    def left(self) -> int:
        """Problems that can still be drawn."""
        return sum(self._left(domain) for domain in self.sizes) if self._epochs is not None else sys.maxsize

    def draw(self) -> Draw:
        """The next problem; there must be one left."""
        open_domains = {d: w for d, w in self._weights.items() if self._left(d) > 0}
        weight, drawn = sum(open_domains.values()), sum(self._drawn[d] for d in open_domains)
        below = [d for d, w in open_domains.items() if self._drawn[d] < w / weight * (drawn + 1)]
        domain = min(below, key=lambda d: (self._drawn[d] + 1) / self._weights[d])
        epoch, place = divmod(self._drawn[domain], self.sizes[domain])
        self._drawn[domain] += 1
        return Draw(domain, int(self._permutation(domain, epoch)[place]), epoch)

    def state(self) -> dict[str, Any]:
        return {"drawn": dict(self._drawn), "sizes": dict(self.sizes)}

    def restore(self, state: Mapping[str, Any]) -> None:
        if set(state["drawn"]) != set(self._weights):
            raise DispatcherError(f"the domains have changed: {sorted(state['drawn'])} before, {sorted(self._weights)} now")
        self._drawn, self.sizes = dict(state["drawn"]), dict(state["sizes"])

    def _left(self, domain: str) -> int:
        if self._epochs is None:
            return sys.maxsize
        return max(self._epochs * self.sizes[domain] - self._drawn[domain], 0)

    def _permutation(self, domain: str, epoch: int) -> npt.NDArray[np.int64]:
        """Sorted draws of the bit generator, whose stream numpy never changes (that of `permutation` it may)."""
        key = (domain, epoch)
        if key not in self._permutations:
            self._permutations = {k: v for k, v in self._permutations.items() if k[0] != domain}
            bits = np.random.PCG64(np.random.SeedSequence([self._seed, zlib.crc32(domain.encode()), epoch]))
            self._permutations[key] = np.argsort(bits.random_raw(self.sizes[domain]), kind="stable")
        return self._permutations[key]
