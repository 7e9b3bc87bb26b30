"""What came of an update by lanes, leg by leg, as one end knows it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from prl.weights import digest
from prl.weights.shipments import Shipment, Slot


@dataclass(frozen=True)
class LegReport:
    """What one root sent to one lane, as one end knows it."""

    root: int
    lane: int
    bytes: int  # on the wire
    leg_s: float  # from the update's begin to the end of the leg
    digest: int  # of all its tiles
    counted: int  # of those that count for the version's digest
    values: int = 0
    changed: int | None = None  # of these, where only those were sent; the root alone knows


@dataclass(frozen=True)
class LaneReport:
    legs: tuple[LegReport, ...]
    transfer_s: float
    buffer_bytes: int  # that it took besides what was sent or staged

    @property
    def bytes(self) -> int:
        return sum(leg.bytes for leg in self.legs)


def lane_digests(legs: Iterable[LegReport]) -> dict[int, int]:
    """By lane: what its worker holds. Those of all roots' legs together equal what each worker reports of its own."""
    sums: dict[int, int] = {}
    for leg in legs:
        sums[leg.lane] = (sums.get(leg.lane, 0) + leg.digest) % digest.MODULUS
    return sums


def version_digest(legs: Iterable[LegReport]) -> int:
    """Of the version, from the legs of all roots, or of all workers of one sampler: each element once, as the digest of the
    whole tensors."""
    return sum(leg.counted for leg in legs) % digest.MODULUS


def changed_share(legs: Iterable[LegReport]) -> float | None:
    """Of a version's values, from the legs of all roots; None where all were sent."""
    values = changed = 0
    for leg in legs:
        if leg.changed is None:
            return None
        values, changed = values + leg.values, changed + leg.changed
    return changed / values if values else None


class Tally:
    """Adds up an update's legs."""

    def __init__(self) -> None:
        self._legs: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._ends_s: dict[tuple[int, int], float] = {}
        self._values: dict[tuple[int, int], int] = {}
        self._changed: dict[tuple[int, int], int] = {}

    def landed(self, shipment: Shipment, sent_bytes: int, after_s: float) -> None:
        leg = shipment.root, shipment.lane
        self._bytes[leg] = self._bytes.get(leg, 0) + sent_bytes
        self._ends_s[leg] = after_s

    def changed(self, shipment: Shipment, values: int) -> None:
        """Only so many of its values are sent."""
        leg = shipment.root, shipment.lane
        self._changed[leg] = self._changed.get(leg, 0) + values

    def add(self, shipment: Shipment, slot: Slot, tile_digest: torch.Tensor) -> None:
        leg = shipment.root, shipment.lane
        counted, uncounted = self._legs.setdefault(leg, ([], []))
        (counted if slot.counted else uncounted).append(tile_digest)
        self._values[leg] = self._values.get(leg, 0) + slot.tile.elements

    def report(self, transfer_s: float, buffer_bytes: int) -> LaneReport:
        legs = []
        for (root, lane), (counted, uncounted) in sorted(self._legs.items()):
            share, rest = digest.total(counted), digest.total(uncounted)
            leg = root, lane
            both = (share + rest) % digest.MODULUS
            told = self._values[leg], self._changed.get(leg)
            legs.append(LegReport(root, lane, self._bytes[leg], self._ends_s[leg], both, share, *told))
        return LaneReport(tuple(legs), transfer_s, buffer_bytes)
