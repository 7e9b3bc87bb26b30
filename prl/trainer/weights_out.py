"""New versions on their way out: offered to the orchestrator, sent to the samplers, reported."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prl.config.tensors import tensor_shapes
from prl.control.client import ControlError
from prl.control.threaded import ThreadedClient
from prl.flow.versions import Version
from prl.trainer import device
from prl.trainer.engine import Engine
from prl.trainer.lanes_out import LanesOut, failures
from prl.trainer.mapping import export_weights
from prl.trainer.model import DTYPES
from prl.trainer.parallel import Channel, shares_weights
from prl.weights.agreement import Facts, facts
from prl.weights.folder import write_version
from prl.weights.group import TransportError
from prl.weights.legs import changed_share, lane_digests, version_digest
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec, to_json
from prl.weights.transport import SendReport, TrainerEnd, libraries

WATCH_AFTER_S = 0.5  # a transfer that lasts so long is asked about: somebody may be gone in it
POLL_S = 10.0  # deadline of that question; the orchestrator answers sooner


class WeightsOut:
    """One on every trainer rank. Rank 0 speaks with the orchestrator. By lanes each rank sends its own part; otherwise rank 0
    sends or writes whole tensors, which the ranks that hold the rest of the model gather with it."""

    def __init__(
        self,
        engine: Engine,
        client: ThreadedClient | None,
        channel: Channel,
        *,
        host: str,
        lineage: int,
        dtype: str,
        workers: int,
        options: WeightsOptions,
        folder: Path,
        start_s: float,
    ) -> None:
        """`client` on rank 0 alone; `channel` for nothing but versions. `dtype` is the samplers', so that both ends take the
        digest of the same bits; `workers` is their tensor parallelism. `folder` is for versions that go by files. `start_s` is
        added to the deadline of the first version, which may have to wait until the samplers are up."""
        self._engine = engine
        self._client = client
        self._channel = channel
        self._lineage = lineage
        self._dtype = DTYPES[dtype]
        self._options = options
        self._folder = folder
        self._extra_s = start_s
        self._specs = [TensorSpec(name, dtype, shape) for name, shape in tensor_shapes(engine.config).items()]
        self._lanes = LanesOut(engine, options, workers, dtype) if options.transport == "lanes" else None
        self._facts = self._own_facts()
        self._end = TrainerEnd(host, options, device.device()) if client is not None else None
        self._epoch = -1
        self._anchor = 0  # the step of the version of which all values went out last
        self._shares_weights = shares_weights()
        self._closing = False
        self.gathers = False  # instead of sending by lanes: the last version could go no other way

    def publish(self, step: int, *, beside: bool = False) -> bool:
        """Bring version `step` to the samplers, unless the orchestrator wants none now. A collective of all ranks. Where the
        transfer fails, a group that the orchestrator has built anew gets the version again, as long as the deadlines of one
        transfer have not passed; then training goes on without.

        `beside` the passes, in another thread than theirs, lanes do not give way to what has to gather tensors: this gives
        whether the version is to be published again, once that can be done."""
        whole = not beside or self._lanes is None  # without lanes what goes beside the passes lies here as a whole
        tensors: Mapping[str, torch.Tensor] | None = None  # whole ones, once they have been gathered
        order = self._ordered(step, whole, offers=True)
        end = time.monotonic() + self._options.group_s + self._options.update_s
        while order["send"]:
            self.gathers = self._lanes is not None and order["transport"] != "lanes"
            if order["transport"] == "lanes":
                sent = self._send_lanes(step, order)
            else:
                tensors = self._gathered() if tensors is None else tensors
                sent = self._send_whole(step, order, tensors)
            order = self._ordered(step, whole, offers=not (sent or self._closing) and time.monotonic() < end)
        later = bool(order.get("later"))
        self.gathers = self.gathers or later
        return later

    def leave(self) -> None:
        """From any thread: end what is being sent, and send nothing again."""
        self._closing = True
        for end in (self._lanes, self._end):
            if end is not None:
                end.leave()

    def close(self) -> None:
        """Leave the groups. Rank 0, which has their store, must not end before the others have left."""
        if self._lanes is not None:
            self._lanes.close()
        if self._end is not None:
            self._end.close()

    def _says(self, doing: str) -> None:
        """What this process does, where it does nothing beside that."""
        if self._client is not None and threading.current_thread() is threading.main_thread():
            self._client.progress(doing)

    def _ordered(self, step: int, whole: bool, *, offers: bool) -> dict[str, Any]:
        """What all ranks are to do next, in the words of rank 0: what the orchestrator answered to its offer of the version,
        or, without one, nothing."""
        order: dict[str, Any] | None = None
        if self._client is not None:
            order = self._offer(self._client, step, whole) if offers else {"send": False}
        return self._channel.broadcast(order)

    def _gathered(self) -> dict[str, torch.Tensor]:
        """Whole tensors on rank 0, by their names; nothing elsewhere, though other ranks have their part in it."""
        if not self._shares_weights:
            return {}
        leads = self._client is not None
        tensors = export_weights(self._engine.chunks, self._engine.config, self._dtype)
        return {name: tensor for name, tensor in tensors if leads}

    def _offer(self, client: ThreadedClient, step: int, whole: bool) -> dict[str, Any]:
        assert self._end is not None
        self._says(f"offering version {step}")
        meeting = {"master_address": self._end.master_address, "master_port": self._end.master_port}
        answer = client.call(
            "offer_version",
            {
                "lineage": self._lineage,
                "step": step,
                "tensors": to_json(self._specs),
                "bytes": sum(spec.bytes for spec in self._specs),
                **meeting,
                "senders": 1 if self._lanes is None else self._lanes.plan.trainer_ranks,
                "epoch": self._epoch,
                "whole": whole,
                "facts": self._facts.to_json(),
            },
            deadline_s=self._options.group_s + 2 * self._options.update_s + self._extra_s,
            reason=f"samplers getting ready for version {step}",
        )
        self._extra_s = 0.0
        return answer | meeting

    def _own_facts(self) -> Facts:
        """What samplers compare with theirs before they join a group."""
        return facts(
            "the trainer",
            os.uname().nodename,
            libraries=libraries(device.device()),
            dtype=str(self._dtype).removeprefix("torch."),
            tensors=self._specs,
            bucket_bytes=self._options.bucket_mib * 2**20,
            environment=os.environ,
            plan="" if self._lanes is None else self._lanes.plan.digest(),
        )

    def _send_lanes(self, step: int, order: Mapping[str, Any]) -> bool:
        """All ranks at once. Whether all have sent their part; false where it failed, and then everyone has left."""
        assert self._lanes is not None
        client, which = self._client, self._which(step, order)
        where = order["master_address"], int(order["master_port"])
        send = partial(self._lanes.send, self._channel, which["epoch"], order["samplers"], *where, self._held(step, order))
        if client is None:
            parts = send()
        else:
            self._says(f"sending version {step}")
            with _watched(client, which, self._lanes.leave):
                parts = send()
        failed = failures(parts)
        if failed:
            if client is not None:
                self._unsent(client, which, *failed[0], overdue=any(part.overdue for part in parts))
            return False
        legs = [leg for part in parts for leg in part.legs]
        sent = sum(leg.bytes for leg in legs), max(part.transfer_s for part in parts), version_digest(legs)
        report = SendReport(*sent, changed_share(legs))
        if report.changed_share is None:
            self._anchor = step
        if client is None:
            return True
        self._epoch = which["epoch"]
        self._sent(client, which, report, lanes=[str(digest) for _, digest in sorted(lane_digests(legs).items())])
        return True

    def _send_whole(self, step: int, order: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
        """Rank 0 alone, to the group of the order or into files. Whether they are sent, as far as this rank knows."""
        client = self._client
        if client is None:
            return True
        which, by_files = self._which(step, order), order["transport"] == "filesystem"
        self._says(f"{'writing' if by_files else 'sending'} version {step}")
        held = self._held(step, order)
        try:
            if by_files:
                report = self._write(step, tensors)
            else:
                report = self._transfer(client, which, int(order["world_size"]), tensors, held)
        except TransportError as error:
            self._unsent(client, which, str(error), error.missing, overdue=error.overdue)
            return False
        if report.changed_share is None:
            self._anchor = step
        self._sent(client, which, report, gathered_bytes=sum(spec.bytes for spec in self._specs))
        return True

    def _held(self, step: int, order: Mapping[str, Any]) -> int | None:
        """The digest of the version that all workers hold, where its difference to this one may be sent."""
        anchor_due = step - self._anchor >= self._options.anchor_every_steps
        return None if anchor_due or order["held"] is None else int(order["held"])

    def _which(self, step: int, order: Mapping[str, Any]) -> dict[str, int]:
        return {"lineage": self._lineage, "step": step, "epoch": int(order["epoch"])}

    def _sent(
        self,
        client: ThreadedClient,
        which: Mapping[str, int],
        report: SendReport,
        *,
        lanes: Sequence[str] = (),
        gathered_bytes: int = 0,
    ) -> None:
        took = {"send_s": report.send_s, "bytes": report.bytes, "changed_share": report.changed_share}
        took["gathered_bytes"] = gathered_bytes
        body = {"digest": str(report.digest), "lanes": lanes, **took}
        reason = f"reporting version {which['step']} as sent"
        client.call("version_sent", {**which, **body}, deadline_s=self._options.update_s, reason=reason)

    def _unsent(
        self, client: ThreadedClient, which: Mapping[str, int], words: str, missing: Sequence[int], *, overdue: bool
    ) -> None:
        self._epoch = -1
        failure = {**which, "error": words, "missing": missing, "overdue": overdue}
        reason = f"reporting that version {which['step']} was not sent"
        client.call("version_unsent", failure, deadline_s=self._options.update_s, reason=reason)

    def _write(self, step: int, tensors: Mapping[str, torch.Tensor]) -> SendReport:
        """Into files, durable on return. Raises OSError, which ends the run: where nothing can be written no run goes on."""
        started = time.monotonic()
        specs = {spec: tensors[spec.name] for spec in self._specs}
        stored = write_version(self._folder, Version(self._lineage, step), specs)
        return SendReport(stored.bytes, time.monotonic() - started, stored.digest)

    def _transfer(
        self,
        client: ThreadedClient,
        which: Mapping[str, Any],
        world_size: int,
        tensors: Mapping[str, torch.Tensor],
        held: int | None,
    ) -> SendReport:
        assert self._end is not None
        with _watched(client, which, self._end.leave):
            if which["epoch"] != self._epoch:
                self._end.join(which["epoch"], world_size)
                self._epoch = which["epoch"]
            return self._end.send(tensors, held)


@contextmanager
def _watched(client: ThreadedClient, which: Mapping[str, Any], leave: Callable[[int], None]) -> Iterator[None]:
    """While this context waits for samplers, leave the epoch's group as soon as the orchestrator says that it is broken."""
    over = threading.Event()

    def watch() -> None:
        over.wait(WATCH_AFTER_S)
        while not over.is_set():
            try:
                answer = client.call("sending", which, deadline_s=POLL_S, reason="whether all samplers are there")
            except ControlError:
                return  # the orchestrator is lost: who waits has a deadline, and learns of it by other calls
            if answer["broken"] and not over.is_set():
                leave(which["epoch"])
                return

    threading.Thread(target=watch, name="watch the transfer", daemon=True).start()
    try:
        yield
    finally:
        over.set()
