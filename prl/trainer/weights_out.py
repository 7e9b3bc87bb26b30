"""New versions on their way out: offered to the orchestrator, sent to the samplers, reported."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from prl.config.tensors import tensor_shapes
from prl.control.client import ControlError
from prl.control.threaded import ThreadedClient
from prl.flow.versions import Version
from prl.metrics import names
from prl.trainer import device
from prl.trainer.engine import Engine
from prl.trainer.mapping import export_weights
from prl.trainer.model import DTYPES
from prl.trainer.parallel import Channel, shares_weights
from prl.weights.agreement import Facts, facts
from prl.weights.folder import write_version
from prl.weights.group import TransportError
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec, to_json
from prl.weights.transport import SendReport, TrainerEnd, libraries

WATCH_AFTER_S = 0.5  # a transfer that lasts so long is asked about: somebody may be gone in it
POLL_S = 10.0  # deadline of that question; the orchestrator answers sooner


class WeightsOut:
    """One on every trainer rank. Rank 0 speaks with the orchestrator and sends; the ranks that hold the
    rest of the model gather the tensors with it; the others only hear of it."""

    def __init__(
        self,
        engine: Engine,
        client: ThreadedClient | None,
        channel: Channel,
        *,
        host: str,
        lineage: int,
        dtype: str,
        options: WeightsOptions,
        folder: Path,
        start_s: float,
    ) -> None:
        """`client` on rank 0 alone. `dtype` is the samplers', so that both ends take the digest of the same bits. `folder` is
        for versions that go by files. `start_s` is added to the deadline of the first version, which may have to wait until the
        samplers are up."""
        self._engine = engine
        self._client = client
        self._channel = channel
        self._lineage = lineage
        self._dtype = DTYPES[dtype]
        self._options = options
        self._folder = folder
        self._extra_s = start_s
        self._specs = [TensorSpec(name, dtype, shape) for name, shape in tensor_shapes(engine.config).items()]
        self._facts = self._own_facts()
        self._end = TrainerEnd(host, options, device.device()) if client is not None else None
        self._epoch = -1
        self._anchor = 0  # the step of the version of which all values went out last
        self._shares_weights = shares_weights()

    def publish(self, step: int) -> dict[str, float]:
        """Bring version `step` to the samplers, unless the orchestrator wants none now. A collective of all ranks. Returns
        what it took as metrics. Where the transfer fails, a group that the orchestrator has built anew gets the version again,
        as long as the deadlines of one transfer have not passed; then training goes on without."""
        started = time.monotonic()
        client = self._client
        if client is None:
            if self._channel.broadcast(None)["send"] and self._shares_weights:
                for _ in export_weights(self._engine.chunks, self._engine.config, self._dtype):
                    pass  # the gathering is the point
            return {names.SEND_S: time.monotonic() - started}

        answer = self._offer(client, step)
        self._channel.broadcast({"send": bool(answer["send"])})
        if answer["send"]:
            tensors = dict(export_weights(self._engine.chunks, self._engine.config, self._dtype))
            end = time.monotonic() + self._options.group_s + self._options.update_s
            while answer["send"] and not self._send(client, step, answer, tensors) and time.monotonic() < end:
                answer = self._offer(client, step)
        return {names.SEND_S: time.monotonic() - started}

    def _offer(self, client: ThreadedClient, step: int) -> dict[str, Any]:
        assert self._end is not None
        client.progress(f"offering version {step}")
        answer = client.call(
            "offer_version",
            {
                "lineage": self._lineage,
                "step": step,
                "tensors": to_json(self._specs),
                "bytes": sum(spec.bytes for spec in self._specs),
                "master_address": self._end.master_address,
                "master_port": self._end.master_port,
                "epoch": self._epoch,
                "facts": self._facts.to_json(),
            },
            deadline_s=self._options.group_s + 2 * self._options.update_s + self._extra_s,
            reason=f"samplers getting ready for version {step}",
        )
        self._extra_s = 0.0
        return answer

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
        )

    def _send(self, client: ThreadedClient, step: int, answer: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
        """To the group of the answer. False: that failed, and the group is left."""
        epoch = int(answer["epoch"])
        anchor_due = step - self._anchor >= self._options.anchor_every_steps
        held = None if anchor_due or answer["held"] is None else int(answer["held"])
        which = {"lineage": self._lineage, "step": step, "epoch": epoch}
        by_files = answer["transport"] == "filesystem"
        client.progress(f"{'writing' if by_files else 'sending'} version {step}")
        try:
            if by_files:
                report = self._write(step, tensors)
            else:
                report = self._transfer(client, which, int(answer["world_size"]), tensors, held)
        except TransportError as error:
            self._epoch = -1
            failure = {**which, "error": str(error), "missing": error.missing}
            words = f"reporting that version {step} was not sent"
            client.call("version_unsent", failure, deadline_s=self._options.update_s, reason=words)
            return False
        if report.changed_share is None:
            self._anchor = step
        took = {"send_s": report.send_s, "bytes": report.bytes, "changed_share": report.changed_share}
        sent = {**which, "digest": str(report.digest), **took}
        client.call("version_sent", sent, deadline_s=self._options.update_s, reason=f"reporting version {step} as sent")
        return True

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
        with _watched(client, which, self._end):
            if which["epoch"] != self._epoch:
                self._end.join(which["epoch"], world_size)
                self._epoch = which["epoch"]
            return self._end.send(tensors, held)


@contextmanager
def _watched(client: ThreadedClient, which: Mapping[str, Any], end: TrainerEnd) -> Iterator[None]:
    """While this context waits for samplers, leave the group as soon as the orchestrator says that it is broken."""
    over = threading.Event()

    def watch() -> None:
        over.wait(WATCH_AFTER_S)
        while not over.is_set():
            try:
                answer = client.call("sending", which, deadline_s=POLL_S, reason="whether all samplers are there")
            except ControlError:
                return  # the orchestrator is lost: who waits has a deadline, and learns of it by other calls
            if answer["broken"] and not over.is_set():
                end.leave(which["epoch"])
                return

    threading.Thread(target=watch, name="watch the transfer", daemon=True).start()
    try:
        yield
    finally:
        over.set()
