"""What the measurements of a preflight come to: pure functions from them and the limits to findings and a verdict."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prl.cluster.options import PreflightOptions
from prl.cluster.preflight.devices import Devices
from prl.cluster.preflight.lustre import Limits, Quota
from prl.cluster.preflight.measure import NodeFacts, Room
from prl.cluster.preflight.storage import Storage
from prl.cluster.preflight.transfer import Link
from prl.flow.ending import Reason

_GIB = 1024**3
_SHOWN = 5  # findings that the cause of a run's end tells one by one


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    nodes: tuple[str, ...]  # at fault; none where it is the storage that all share
    words: str
    ends: Reason | None = "bad node"  # what the run ends of; None: this is a warning


@dataclass(frozen=True)
class Verdict:
    """Why a run cannot go on."""

    words: str
    nodes: tuple[str, ...]
    reason: Reason


def judge_node(name: str, facts: NodeFacts, canary: str | None, options: PreflightOptions, devices: int) -> Iterator[Finding]:
    """`canary`: what rank 0's node has read; `devices`: how many accelerators of each node the run uses."""

    def bad(words: str) -> Finding:
        return Finding((name,), f"{name}: {words}")

    for what, why in facts.failed.items():
        yield bad(f"{what}: {why}")
    if facts.canary is not None and canary is not None and facts.canary != canary:
        yield bad("the run folder that it sees is not the one that rank 0 sees: the file `canary` in it is another one")
    clock = facts.clock
    if clock is not None and abs(clock.offset_s) - clock.error_s > options.clock_s:
        way = "ahead of" if clock.offset_s > 0 else "behind"
        yield bad(
            f"its clock is {abs(clock.offset_s):.1f} s {way} the orchestrator's, more than cluster.preflight.clock_s = "
            f"{options.clock_s:g}"
        )
    if facts.memory_bytes is not None and facts.memory_bytes < options.memory_gib * _GIB:
        yield bad(
            f"{_gib(facts.memory_bytes)} of memory are free, less than cluster.preflight.memory_gib = {options.memory_gib:g}"
        )
    if facts.room is not None:
        yield from (bad(words) for words in _too_small(facts.room, "for temporary files", options))
    if facts.ports is not None and facts.ports < options.ports:
        yield bad(
            f"about {facts.ports} ports between 20,000 and 32,000 are free, less than cluster.preflight.ports = {options.ports}"
        )
    if facts.devices is not None:
        yield from _judge_devices(name, facts.devices, options, devices)


def _too_small(room: Room, purpose: str, options: PreflightOptions) -> Iterator[str]:
    where = f"in {room.folder} {purpose}"
    if room.free_bytes < options.disk_gib * _GIB:
        yield f"{_gib(room.free_bytes)} are free {where}, less than cluster.preflight.disk_gib = {options.disk_gib:g}"
    if room.free_files is not None and room.free_files < options.files:
        yield f"{room.free_files:,} files may still be made {where}, less than cluster.preflight.files = {options.files}"


def _judge_devices(name: str, devices: Devices, options: PreflightOptions, wanted: int) -> Iterator[Finding]:
    """Of the first `wanted` ones, which the run uses."""
    for line in devices.said:
        yield Finding((name,), f"{name}: nvidia-smi says: {line}")
    used = devices.there[:wanted]
    if len(used) < wanted and not devices.said:
        yield Finding((name,), f"{name}: {len(used)} accelerators are there, and {wanted} are wanted (cluster.gpus_per_node)")
    for device in used:
        which = f"{name}: accelerator {device.index}"
        if device.lost:
            yield Finding((name,), f"{which} does not answer: {device.lost}")
        if device.repair_failed:
            yield Finding((name,), f"{which} ({device.name}) has broken memory that could not be replaced")
        if device.used_bytes is not None and device.used_bytes > options.device_memory_gib * _GIB:
            yield Finding(
                (name,),
                f"{which} ({device.name}): {_gib(device.used_bytes)} of its memory are in use by others, more than "
                f"cluster.preflight.device_memory_gib = {options.device_memory_gib:g}",
            )
        if device.uncorrected_errors:
            yield Finding(
                (name,), f"{which} ({device.name}) had {device.uncorrected_errors} uncorrected memory errors", ends=None
            )
        if device.repair_pending:
            yield Finding((name,), f"{which} ({device.name}) has broken memory that its next reset replaces", ends=None)


def judge_storage(storage: Storage, options: PreflightOptions) -> Iterator[Finding]:
    """Of the run folder's filesystem."""
    for words in storage.failed:
        yield Finding((), words, ends="error" if storage.room is None else None)
    if storage.room is not None:
        yield from (Finding((), words, "quota") for words in _too_small(storage.room, "for the run", options))
    for quota in storage.quotas:
        yield from _judge_quota(quota, options)
    if storage.targets is None:
        return
    for words in storage.targets.down:
        yield Finding((), f"a storage target does not answer: {words}", ends=None)
    fullest = storage.targets.fullest
    if fullest is not None and fullest.used_percent > options.target_percent:
        yield Finding(
            (),
            f"storage target {fullest.name} is {fullest.used_percent} % full ({_gib(fullest.available_bytes)} are left): a "
            f"file that lies on it cannot grow, whatever room there is on others",
            ends=None,
        )


def _judge_quota(quota: Quota, options: PreflightOptions) -> Iterator[Finding]:
    of = f"of {quota.owner} on {quota.filesystem}"
    blocks, files = quota.blocks.left, quota.files.left
    if blocks is not None and blocks < options.disk_gib * _GIB:
        limit = f"cluster.preflight.disk_gib = {options.disk_gib:g}"
        yield Finding((), f"the quota {of} leaves {_gib(blocks)}, less than {limit}", "quota")
    elif _is_over(quota.blocks):
        yield Finding((), f"the quota {of} is exceeded: writing goes on for {quota.blocks.grace}", ends=None)
    if files is not None and files < options.files:
        limit = f"cluster.preflight.files = {options.files}"
        yield Finding((), f"the quota {of} leaves {files:,} files, less than {limit}", "quota")
    elif _is_over(quota.files):
        yield Finding((), f"the quota {of} for files is exceeded: making more goes on for {quota.files.grace}", ends=None)


def _is_over(limits: Limits) -> bool:
    return limits.over or bool(limits.soft and limits.used > limits.soft)


def judge_links(links: Sequence[Link], options: PreflightOptions) -> Iterator[Finding]:
    """A transfer that failed or was slow is the fault of the node that all failed with, where there were several, else of
    the other one; where there was one alone nobody can tell which."""
    ill = [link for link in links if link.error or link.slowest_mib_per_s < options.bandwidth_mib_per_s]
    for link in ill:
        with_peer = [other for other in links if other.peer == link.peer]
        blame: tuple[str, ...] = (link.node,)
        if all(other in ill for other in with_peer):
            blame = (link.peer,) if len(with_peer) > 1 else (link.node, link.peer)
        between = f"{link.node} and {link.peer}"
        if link.error:
            yield Finding(blame, f"between {between} a transfer failed: {link.error}")
        else:
            yield Finding(
                blame,
                f"between {between} {link.slowest_mib_per_s:.1f} MiB/s go over TCP, less than "
                f"cluster.preflight.bandwidth_mib_per_s = {options.bandwidth_mib_per_s:g}",
            )


def verdict(findings: Sequence[Finding], excluded: str | None) -> Verdict | None:
    """None: the run may go on. `excluded`: the nodes that Slurm was told to leave out already, by commas; None: the run has no
    nodes of Slurm's."""
    ending = [(finding, finding.ends) for finding in findings if finding.ends is not None]
    if not ending:
        return None
    nodes = tuple(dict.fromkeys(name for finding, _ in ending for name in finding.nodes))
    shown = [finding.words for finding, _ in ending[:_SHOWN]]
    if len(ending) > len(shown):
        shown.append(f"and {len(ending) - len(shown)} findings more, in preflight.json")
    words = "preflight: " + "; ".join(shown)
    if nodes and excluded is not None:
        names = ",".join(filter(None, (excluded, *nodes)))
        words += f". To submit the run again without {'them' if len(nodes) > 1 else 'it'}: --exclude={names}"
    return Verdict(words, nodes, ending[0][1])


def late(missing: Mapping[str, bool], limit_s: float) -> Iterator[Finding]:
    """Of nodes that have not answered in time, by whether their agents had joined."""
    for name, joined in missing.items():
        how = "did not answer" if joined else "did not join the run"
        yield Finding((name,), f"{name}: its agent {how} within {limit_s:g} s")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f} GiB"
