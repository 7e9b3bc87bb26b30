"""The orchestrator's side of the preflight: it hears what every node is like, and decides once for all of them."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prl.cluster.preflight.judge import Finding, judge_links, judge_node, judge_storage, late, verdict
from prl.cluster.preflight.measure import NodeFacts
from prl.cluster.preflight.storage import Storage, measure_storage
from prl.cluster.preflight.transfer import Link, pairs, turns_s
from prl.cluster.split import kind_of
from prl.config.schema import Config
from prl.control.server import Answer, Bell, Handler, Member
from prl.control.tasks import thread_to_its_end
from prl.orchestrator.binding import Plan
from prl.orchestrator.causes import Causes
from prl.orchestrator.outcome import REPORTED, Cause
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish_json

log = logging.getLogger(__name__)


class PreflightDesk:
    def __init__(self, run: RunFolder, config: Config, plan: Plan, causes: Causes, bell: Bell) -> None:
        self._run = run
        self._config = config
        self._plan = plan
        self._causes = causes
        self._bell = bell
        self._options = config.cluster.preflight
        self._names = [str(node["name"]) for node in plan.nodes]
        self._pairs = pairs([int(node["component"]) for node in plan.nodes])
        self._transfers_s = 2 * turns_s(self._pairs)  # that all of them may take
        self._limit_s = config.control.start_s + self._transfers_s
        self._changed = Bell()  # for the calls that are held: few rings, as there may be a thousand
        bell.on_ring(lambda: self._changed.ring() if causes else None)
        self._asked: set[int] = set()  # nodes that have heard what is asked of them
        self._all_asked: float | None = None  # when the last of them came, in seconds since the epoch
        self._facts: dict[int, NodeFacts] = {}
        self._ports: dict[int, int] = {}
        self._links: dict[int, Link] = {}
        self._transfers = False  # may begin
        self._goes_on = False

    def handlers(self) -> dict[str, Handler]:
        return {
            "preflight": self._preflight,
            "clock": self._clock,
            "measured": self._measured,
            "transferred": self._transferred,
        }

    async def passed(self) -> bool:
        """Whether all nodes will do; where not, the cause is there."""
        if not self._options.enabled:
            return True
        began = time.monotonic()
        findings, storage = await self._judge_nodes()
        if not (self._causes or any(finding.ends is not None for finding in findings)):
            findings += await self._judge_links()
        if self._causes:
            return False
        for finding in findings:
            if finding.ends is None:
                log.warning("preflight: %s", finding.words)
        await thread_to_its_end(self._publish, findings, storage, time.monotonic() - began)
        found = verdict(findings, self._excluded())
        if found is not None:
            role, host = ("agent", ",".join(found.nodes)) if found.nodes else (None, None)
            self._causes.add(Cause(found.words, role, REPORTED, reason=found.reason, host=host))
            return False
        self._goes_on = True
        self._changed.ring()
        return True

    async def _judge_nodes(self) -> tuple[list[Finding], Storage | None]:
        """Each node by itself, and the filesystem of the run folder, about which this process asks meanwhile."""
        limit_s = self._config.control.start_s
        asking = asyncio.create_task(measure_storage(self._run.path), name="the room in the run folder")
        asking.add_done_callback(lambda _: self._bell.ring())
        everyone = set(range(len(self._names)))
        await self._bell.until(lambda: bool(self._causes) or (asking.done() and len(self._facts) == len(everyone)), limit_s)
        findings: list[Finding] = []
        storage = asking.result() if asking.done() else None
        if storage is None:
            asking.cancel()
            findings.append(Finding((), f"{self._run.path}: its filesystem did not answer within {limit_s:g} s", "error"))
        else:
            findings += judge_storage(storage, self._options)
        first = self._facts.get(0)
        for node, facts in sorted(self._facts.items()):
            canary = None if first is None else first.canary
            devices = self._config.cluster.gpus_per_node
            findings += judge_node(self._names[node], facts, canary, self._options, devices)
        missing = {self._names[node]: node in self._asked for node in sorted(everyone - self._facts.keys())}
        return [*findings, *late(missing, limit_s)], storage

    async def _judge_links(self) -> list[Finding]:
        self._transfers = True
        self._changed.ring()
        await self._bell.until(lambda: bool(self._causes) or self._links.keys() >= self._pairs.keys(), self._transfers_s)
        missing = {self._names[node]: True for node in sorted(self._pairs.keys() - self._links.keys())}
        return [*judge_links(list(self._links.values()), self._options), *late(missing, self._transfers_s)]

    def _publish(self, findings: Sequence[Finding], storage: Storage | None, took_s: float) -> None:
        content = {
            "all_joined": self._all_asked,
            "took_s": took_s,
            "nodes": {self._names[node]: asdict(facts) for node, facts in sorted(self._facts.items())},
            "storage": None if storage is None else asdict(storage),
            "links": [asdict(link) for _, link in sorted(self._links.items())],
            "findings": [asdict(finding) for finding in findings],
        }
        publish_json(self._run.preflight(self._plan.attempt), content)

    def _excluded(self) -> str | None:
        """The nodes that Slurm was told to leave out; None without Slurm."""
        if kind_of(self._config) == "local":
            return None
        return str(self._config.cluster.sbatch.get("exclude") or "")

    async def _held(self, condition: Callable[[], bool]) -> None:
        """Keep a call until there is an answer; `passed` ends first, with a cause where somebody was waited for in vain."""
        await self._changed.until(lambda: bool(self._causes) or condition(), self._limit_s)

    # What the agents call

    async def _preflight(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """{wanted: null where nothing is asked of the node, which may go on}."""
        if not self._options.enabled:
            return {"wanted": None}
        self._asked.add(member.index)
        if self._all_asked is None and len(self._asked) == len(self._names):
            self._all_asked = time.time()
        wanted = {
            "visible_s": self._options.visible_s,
            "devices": self._config.cluster.gpus_per_node > 0,
            "listens": member.index in self._pairs.values(),
            "limit_s": self._limit_s,
        }
        return {"wanted": wanted}

    async def _clock(self, member: Member, body: Mapping[str, Any]) -> Answer:
        return {"time_s": time.time()}

    async def _measured(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """{facts, port}; {peer: with whom the node is to exchange bytes, or null}, once all nodes were measured."""
        self._facts[member.index] = NodeFacts.of(body["facts"])
        if body["port"] is not None:
            self._ports[member.index] = int(body["port"])
        self._bell.ring()
        await self._held(lambda: self._transfers)
        peer = self._pairs.get(member.index) if self._transfers else None
        if peer is None:
            return {"peer": None}
        return {"peer": {"host": self._plan.nodes[peer]["address"], "port": self._ports[peer], "wait_s": turns_s(self._pairs)}}

    async def _transferred(self, member: Member, body: Mapping[str, Any]) -> Answer:
        """{link: facts of a Link, null without one}; {goes_on}, once that is decided."""
        if body["link"] is not None:
            peer = self._names[self._pairs[member.index]]
            self._links[member.index] = Link(self._names[member.index], peer, **body["link"])
            self._bell.ring()
        await self._held(lambda: self._goes_on)
        return {"goes_on": self._goes_on}
