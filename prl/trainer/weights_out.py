"""New versions on their way out: offered to the orchestrator, sent to the samplers, reported."""

import time

from prl.control.threaded import ThreadedClient
from prl.metrics import names
from prl.trainer import device
from prl.trainer.engine import Engine
from prl.trainer.mapping import export_weights
from prl.trainer.model import DTYPES
from prl.trainer.parallel import Channel, shares_weights
from prl.trainer.table import tensor_shapes
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec, to_json
from prl.weights.transport import TrainerEnd


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
        start_s: float,
    ) -> None:
        """`client` on rank 0 alone. `dtype` is the samplers', so that both ends take the digest of the same bits. `start_s` is
        added to the deadline of the first version, which may have to wait until the samplers are up."""
        self._engine = engine
        self._client = client
        self._channel = channel
        self._lineage = lineage
        self._dtype = DTYPES[dtype]
        self._options = options
        self._extra_s = start_s
        self._specs = [TensorSpec(name, dtype, shape) for name, shape in tensor_shapes(engine.config).items()]
        self._end = TrainerEnd(host, options, device.device()) if client is not None else None
        self._epoch = -1
        self._shares_weights = shares_weights()

    def publish(self, step: int) -> dict[str, float]:
        """Bring version `step` to the samplers, unless the orchestrator wants none now. A collective of all ranks. Returns
        what it took as metrics."""
        started = time.monotonic()
        client, end = self._client, self._end
        if client is None or end is None:
            if self._channel.broadcast(None)["send"] and self._shares_weights:
                for _ in export_weights(self._engine.chunks, self._engine.config, self._dtype):
                    pass  # the gathering is the point
            return {names.SEND_S: time.monotonic() - started}

        client.progress(f"offering version {step}")
        answer = client.call(
            "offer_version",
            {
                "lineage": self._lineage,
                "step": step,
                "tensors": to_json(self._specs),
                "bytes": sum(spec.bytes for spec in self._specs),
                "master_address": end.master_address,
                "master_port": end.master_port,
                "epoch": self._epoch,
            },
            deadline_s=self._options.group_s + self._options.update_s + self._extra_s,
            reason=f"samplers getting ready for version {step}",
        )
        self._extra_s = 0.0
        self._channel.broadcast({"send": bool(answer["send"])})
        if not answer["send"]:
            return {names.SEND_S: time.monotonic() - started}
        client.progress(f"sending version {step}")
        if answer["epoch"] != self._epoch:
            end.join(answer["epoch"], answer["world_size"])
            self._epoch = answer["epoch"]
        report = end.send(dict(export_weights(self._engine.chunks, self._engine.config, self._dtype)))
        client.call(
            "version_sent",
            {
                "lineage": self._lineage,
                "step": step,
                "digest": str(report.digest),
                "send_s": report.send_s,
                "bytes": report.bytes,
            },
            deadline_s=self._options.update_s,
            reason=f"reporting version {step} as sent",
        )
        return {names.SEND_S: time.monotonic() - started}
