"""The trainer's end of the lanes: two tensor-parallel ranks, each in a thread of the test."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from lab import Lab, Reply
from launch import HOST, TRAIN
from tiny_models import Weights

from prl.config.hf_config import read_model_config
from prl.config.layout import layout_of
from prl.config.load import load
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.digest import digest
from prl.weights.group import TransportError
from prl.weights.lanes import LaneSender
from prl.weights.legs import LaneReport, lane_digests, version_digest
from prl.weights.plan import to_json
from prl.weights.shards import sampler_shards
from prl.weights.shipments import Route

RANKS = 2


def route_to(lab: Lab) -> Route:
    model, workers = read_model_config(lab.folder.model), lab.joined["workers"]
    plan = compile_plan(model, layout_of(TRAIN), RANKS, workers, "float32")
    return Route(plan, sampler_shards(model, workers), 2**20, load(lab.folder.config).weights.delta)


def meet(lab: Lab, plan: str, ranks: int = RANKS) -> Reply:
    """Ask the sampler to join a new epoch's lanes."""
    lab.epoch += 1
    facts = {"facts": lab.facts(os.environ, plan=plan), "lanes": {"trainer_ranks": ranks, "samplers": [0]}}
    return lab.request("POST", "/prl/weights/connect", lab.meeting(lab.epoch) | facts)


class LaneTrainer:
    def __init__(self, lab: Lab, pool: ThreadPoolExecutor) -> None:
        self.lab, self.route, self._pool = lab, route_to(lab), pool
        self._committed = False  # what came over these lanes last
        reply = meet(lab, self.route.plan.digest())
        assert reply.status == 200, reply
        crew = Crew(lab.epoch, RANKS, (0,), self.route.plan.lanes)
        port = lab.trainer.master_port
        self._senders = list(pool.map(lambda rank: LaneSender(self.route, crew, rank, HOST, port, group_s=30.0), range(RANKS)))

    def update(self, weights: Weights) -> list[LaneReport]:
        """Send a version and have it committed, as the orchestrator would."""
        reports = self.send(weights, held=self._committed)
        reply = self.lab.commit(digest(weights))
        assert reply.status == 200, reply
        assert reply.body["digest"] == str(digest(weights))  # of the live parameters
        self._committed = True
        return reports

    def send(self, weights: Weights, *, held: bool = False) -> list[LaneReport]:
        """Send the next version: each worker holds what its lane was sent. `held`: the one before was committed; where the
        sampler takes deltas, only what differs from that goes."""
        reports, staged = self._sent(weights, held)
        legs = [leg for report in reports for leg in report.legs]
        assert {one["worker"]: one.get("digest") for one in staged} == {k: str(v) for k, v in lane_digests(legs).items()}
        assert version_digest(legs) == digest(weights)
        return reports

    def refused(self, weights: Weights) -> Mapping[str, Any]:
        """What the first worker says of a delta that it does not take."""
        try:
            _, staged = self._sent(weights, True)
        except TransportError:  # it may have left before all was sent
            staged = [self.lab.staged.get(timeout=30)]
        return staged[0]

    def _sent(self, weights: Weights, held: bool) -> tuple[list[LaneReport], list[Mapping[str, Any]]]:
        lab, plan = self.lab, self.route.plan
        self._committed = False
        lab.step += 1
        order = {"lineage": 0, "step": lab.step, "epoch": lab.epoch, "tensors": to_json(plan.tensors), "bucket_bytes": 2**20}
        reply = lab.request("POST", "/prl/weights/receive", order)
        assert reply.status == 200, reply
        matrices = [weights[spec.name].reshape(spec.shape[0], -1) for spec in plan.tensors]

        def source(tile):
            return matrices[tile.tensor][tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns]

        reports = list(self._pool.map(lambda sender: sender.send(source, 30.0, held=held), self._senders))
        return reports, [lab.staged.get(timeout=30) for _ in range(plan.lanes)]

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


@contextmanager
def lane_trainer(lab: Lab) -> Iterator[LaneTrainer]:
    """In a new epoch; whoever sends whole tensors afterwards has to connect again."""
    with ThreadPoolExecutor(RANKS) as pool:
        trainer = LaneTrainer(lab, pool)
        try:
            yield trainer
        finally:
            trainer.close()
