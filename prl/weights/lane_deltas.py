"""Versions by lanes as differences to the one before (prl/weights/delta.py): what both ends keep of that one, and how they know
that it is the same.

A bucket goes as a header and a body. A root keeps a copy of what it has sent; a worker keeps nothing, for what it holds live is
the version before, once that was committed. Both know their parts of it by the digests of its legs, which are equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from prl.weights.delta import Form, Header, Message, Outgoing, apply, items_of, read_header
from prl.weights.legs import LegReport
from prl.weights.shipments import Shipment, View

LegDigests = Mapping[tuple[int, int], int]  # by root and lane


def leg_digests(legs: Iterable[LegReport]) -> LegDigests:
    return {(leg.root, leg.lane): leg.digest for leg in legs}


@dataclass(frozen=True)
class Base:
    """The version before, as a worker has it."""

    digests: LegDigests
    view: View

    def digest_of(self, shipment: Shipment) -> int | None:
        return self.digests.get((shipment.root, shipment.lane))


@dataclass(frozen=True)
class Sent:
    """The version before, as a root has sent it."""

    digests: LegDigests
    buckets: Mapping[tuple[int, int], Sequence[torch.Tensor]]


class Teller:
    """What a root has to say of a version, bucket by bucket in the order of its transfers."""

    def __init__(self, before: Sent | None) -> None:
        """`before` is used up; None: all is told."""
        self.differs = before is not None
        self._before = before
        self._legs: dict[tuple[int, int], Outgoing] = {}

    def message(self, shipment: Shipment, packed: torch.Tensor) -> Message:
        """Of the next bucket, whose bytes may change again only when it is sent."""
        leg, before = (shipment.root, shipment.lane), self._before
        if leg not in self._legs:
            self._legs[leg] = Outgoing(None) if before is None else Outgoing(before.buckets[leg], before.digests[leg])
        return self._legs[leg].message(packed, shipment.item_bytes)

    def sent(self, legs: Iterable[LegReport]) -> Sent:
        """What has been told, once that is over."""
        return Sent(leg_digests(legs), {leg: outgoing.buckets for leg, outgoing in self._legs.items()})


def header_of(shipment: Shipment, fields: torch.Tensor, base: Base | None) -> Header:
    """Of a message to a worker. Raises DeltaError where it is damaged, or a difference to what the worker does not hold."""
    size = shipment.item_bytes
    return read_header(fields, size, shipment.bytes // size, None if base is None else base.digest_of(shipment))


def write(shipment: Shipment, message: Message, base: Base | None, state: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """The bucket's tiles to their places, in which the version before may lie, by way of `state`. Raises DeltaError."""
    content = message.body
    if message.header.form is not Form.DENSE:
        assert base is not None  # `header_of` refuses it without
        content = state[: shipment.bytes]
        for slot, piece in shipment.pieces(content):
            piece.copy_(base.view(slot.tile).view(piece.shape))
        apply(items_of(content, shipment.item_bytes), message)
    for (_, piece), place in zip(shipment.pieces(content), places, strict=True):
        place.copy_(piece)
