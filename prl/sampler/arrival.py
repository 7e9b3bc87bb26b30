"""How a version arrives: over the group of an epoch, over its lanes or from files, into tensors beside the live ones or, with
weights.staging: chunked, over them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch

from prl.flow.versions import Version
from prl.runfolder.weights import StoredError
from prl.sampler.lanes_in import LaneEnd
from prl.sampler.link import End
from prl.sampler.live import live_tensors, write_live
from prl.sampler.placement import Part, slab
from prl.sampler.staging import Staged
from prl.weights import digest
from prl.weights.folder import VersionReader
from prl.weights.lane_deltas import LegDigests
from prl.weights.lanes import Writing
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec
from prl.weights.transport import Whole


def receive_version(
    end: End,
    version: Version,
    specs: list[TensorSpec],
    parts: list[Part],
    bucket_bytes: int,
    options: WeightsOptions,
    writing: Writing | None,
    held: Whole | None,
    legs: LegDigests,
) -> Staged:
    """The version that comes next; with `writing` over the live one, within its context. `held`, `legs`: what it may be a delta
    to, of the group or of the lanes. Raises TransportError, DeltaError."""
    if isinstance(end, LaneEnd):
        got = end.receive(parts, options.update_s, writing, legs)
        return Staged(version, got.shards, parts, got.counted, share=True, told=got.digest, legs=got.legs)
    if writing is not None:
        arriving = end.arriving(specs, bucket_bytes, options.update_s)
        total = _write_over(arriving, parts, writing)
        return Staged(version, live_tensors(parts), parts, total, share=False, told=total)
    tensors = end.receive(specs, bucket_bytes, options.update_s, deltas=options.delta, held=held)
    shards = [part.of(tensors[part.spec.name]) for part in parts]
    whole = Whole(tensors, digest.digest(tensors))
    kept = whole if options.delta else None
    return Staged(version, shards, parts, whole.digest, share=False, told=whole.digest, whole=kept)


def _write_over(arriving: Iterable[tuple[TensorSpec, torch.Tensor]], parts: Sequence[Part], writing: Writing) -> int:
    """Tensor by tensor; the digest of what has arrived."""
    of: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        of[part.spec.name].append(part)
    digests = []
    for spec, tensor in arriving:
        digests.append(digest.part(spec.name, tensor))
        with writing():
            for part in of[spec.name]:
                write_live(part, part.of(tensor))
    return digest.total(digests)


def read_version(
    reader: VersionReader,
    version: Version,
    parts: list[Part],
    device: torch.device | str,
    writing: Writing | None,
    wanted: Callable[[], bool],
) -> Staged:
    """This worker's part of a version, from files; with `writing` over the live one, within its context. Raises StoredError,
    also where it is not `wanted` any more."""
    shards, counted = [], []
    for part in parts:
        if not wanted():
            raise StoredError(f"version {version} is not wanted any more")
        shard = reader.read(slab(part), device, verify=not part.counted).reshape(part.held_shape)
        if part.counted:
            counted.append(part.digest_of(shard))
        if writing is not None:
            with writing():  # reading may have taken longer than it was wanted
                write_live(part, shard)
            (shard,) = live_tensors([part])
        shards.append(shard)
    own = digest.total(counted)
    return Staged(version, shards, parts, own, share=True, told=own)
