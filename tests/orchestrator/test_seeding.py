"""Seeding of samplers against HTTP servers that stand for them, with real files; the rig is that of the updates."""

import asyncio
import json

import pytest
import torch
from update_rig import DIES, FAILS, REFUSES, STANDS_STILL, WORKERS, Rig

from prl.flow.versions import Version
from prl.orchestrator.seeding import Seeder
from prl.runfolder.weights import folder_of
from prl.weights.digest import digest
from prl.weights.folder import Slab, VersionReader, write_pieces
from prl.weights.plan import to_json
from prl.weights.transport import spec_of

WHOLE = {"a": torch.arange(12.0).reshape(6, 2), "b": torch.ones(3)}
SPECS = [spec_of(name, tensor) for name, tensor in WHOLE.items()]
DIGEST = str(digest(WHOLE))


class SeedRig(Rig):
    """All three serve version 3, and the seeder looks after who comes."""

    def __init__(self, folder):
        super().__init__(restarts=3)
        self.weights = folder

    async def __aenter__(self):
        await super().__aenter__()
        self.seeder = Seeder(
            self.weights,
            self.calls,
            self.options,
            self.desk,
            current=lambda: self.updater.current,
            busy=lambda: self.updater.under_way is not None,
        )
        self.updater._on_committed = lambda committed: (self.committed.append(committed), self.seeder.committed(committed))
        self.running = asyncio.create_task(self.seeder.run())
        await self.version(0, 1, 2, step=3)
        return self

    async def __aexit__(self, *arguments):
        self.running.cancel()
        await self.seeder.close()
        await super().__aexit__(*arguments)

    async def version(self, *replicas, step):
        answer = await self.updater.offer({**self.offered(step)})
        self.epoch = answer["epoch"]
        await self.stage(*replicas, digest=DIGEST, step=step)
        await self.sent(digest=DIGEST, step=step)
        await self.settled()
        assert self.membership.serving == replicas

    def offered(self, step):
        meeting = {"master_address": "127.0.0.1", "master_port": 1, "facts": {}}
        return {"lineage": 0, "step": step, "senders": 1, "tensors": to_json(SPECS), "whole": True, **meeting}

    async def back(self, *replicas):
        for replica in replicas:
            self.desk.died(replica, f"sampler {replica} was ended by SIGKILL")
            for sampler in self.samplers:
                sampler.calls.clear()
        for replica in replicas:
            self.join(replica)

    async def store(self, giver=0, tensors=WHOLE, workers=None):
        """What the giver's workers do when they are asked, each with some of the tensors."""
        order = await self.samplers[giver].asked("store")
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        for worker in range(WORKERS[giver]) if workers is None else workers:
            mine = specs[worker :: WORKERS[giver]]
            pieces = [(Slab.whole(spec), tensors[spec.name]) for spec in mine]
            files = write_pieces(folder_of(self.weights, Version(0, 0)).parent / order["folder"], f"rank_{worker}", pieces)
            body = {"seed": order["seed"], "replica": giver, "worker": worker, "files": [file.to_json() for file in files]}
            await self.seeder.stored(json.loads(json.dumps(body)))
        return order

    async def read(self, replica, share=None, error=None):
        """What a newcomer's workers do when they are asked: the first one reads everything."""
        order = await self.samplers[replica].asked("load")
        reader = VersionReader(self.weights, Version(order["lineage"], order["step"]), SPECS, 0.0)
        whole = {spec.name: reader.read(Slab.whole(spec), verify=True) for spec in SPECS}
        for worker in range(WORKERS[replica]):
            body = {"seed": order["seed"], "replica": replica, "worker": worker}
            value = (digest(whole) if worker == 0 else 0) if share is None else share
            await self.seeder.staged({**body, **({"error": error} if error else {"digest": str(value)})})
        return order

    async def serve(self, *replicas):
        assert await self.desk.changed.until(lambda: self.membership.serving == replicas, 5)


def run(folder, scenario):
    async def main():
        async with SeedRig(folder) as rig:
            await scenario(rig)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_who_comes_back_gets_the_version_of_another_one_and_serves_without_the_trainer(tmp_path):
    async def scenario(rig):
        await rig.back(1)
        order = await rig.store(0)
        assert (order["lineage"], order["step"], order["tensors"]) == (0, 3, to_json(SPECS))
        await rig.read(1)
        await rig.serve(0, 1, 2)
        commit = {"lineage": 0, "step": 3, "digest": DIGEST, "clear_cache": False}
        assert rig.samplers[1].calls[-1] == ("commit", commit)
        assert rig.samplers[0].verbs() == ["store"]  # it serves on
        assert rig.samplers[2].verbs() == []
        assert rig.membership.seeded == 1
        assert rig.words[-1].startswith("sampler 1 serves: it has version 0:3 from sampler 0, ")
        await rig.version(0, 1, 2, step=4)  # and takes part in the next one
        assert rig.samplers[1].verbs()[-3:] == ["connect", "receive", "commit"]

    run(tmp_path, scenario)


def test_several_newcomers_read_the_same_files_and_later_ones_need_no_giver(tmp_path):
    async def scenario(rig):
        await rig.back(0, 1)
        await rig.store(2)
        await asyncio.gather(rig.read(0), rig.read(1))
        await rig.serve(0, 1, 2)
        await rig.back(0)
        await rig.read(0)
        await rig.serve(0, 1, 2)
        assert all("store" not in sampler.verbs() for sampler in rig.samplers)  # since the calls were cleared
        assert "sampler 0 serves: it has version 0:3 from the files that are there" in rig.words[-1]

    run(tmp_path, scenario)


def test_the_trainers_next_version_comes_first(tmp_path):
    async def scenario(rig):
        await rig.back(1)
        await rig.samplers[0].asked("store")
        await rig.version(0, 1, 2, step=4)  # while the giver still writes
        await rig.store(0)  # which is late, and nobody's
        assert rig.membership.seeded == 0
        assert rig.samplers[1].verbs() == ["connect", "receive", "commit"]
        await rig.seeder.close()
        assert list(rig.weights.iterdir()) == []

    run(tmp_path, scenario)


def test_a_giver_that_dies_is_replaced_by_another(tmp_path):
    async def scenario(rig):
        await rig.back(1)
        await rig.samplers[0].asked("store")
        rig.desk.died(0, "sampler 0 was ended by SIGKILL")
        await rig.store(2)
        await rig.read(1)
        await rig.serve(1, 2)

    run(tmp_path, scenario)


@pytest.mark.parametrize("does", [REFUSES, STANDS_STILL, FAILS, DIES])
def test_a_giver_that_does_not_even_begin(tmp_path, does):
    async def scenario(rig):
        rig.samplers[0].does = {"store": does}
        await rig.back(1)
        if does == REFUSES:
            assert await rig.desk.changed.until(lambda: rig.membership.to_send == (1,), 5)
            assert "sampler 1 waits for the trainer's next version: sampler 0 refused store: 409" in rig.words[-1]
        else:
            await rig.store(2)
            await rig.read(1)
            await rig.serve(1, 2)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"error": "OSError: no space is left"}, "sampler 0 did not write version 0:3: OSError: no space is left"),
        (None, "waited 0.5 s for sampler 0 to write version 0:3 to "),
    ],
)
def test_where_the_giver_cannot_write_the_newcomer_waits_for_the_trainer(tmp_path, report, words):
    async def scenario(rig):
        await rig.back(1)
        order = await rig.samplers[0].asked("store")
        if report:
            await rig.seeder.stored({"seed": order["seed"], "replica": 0, "worker": 0, **report})
        assert await rig.desk.changed.until(lambda: rig.membership.to_send == (1,), 5)
        assert words in rig.words[-1]
        assert rig.membership.serving == (0, 2)
        await rig.version(0, 1, 2, step=4)

    run(tmp_path, scenario)


def test_a_giver_whose_live_weights_are_not_the_version_is_closed_and_another_one_gives(tmp_path):
    async def scenario(rig):
        await rig.back(1)
        await rig.store(0, WHOLE | {"b": torch.zeros(3)})
        assert await rig.desk.changed.until(lambda: 0 not in rig.membership.serving, 5)
        assert "sampler 0 serves other weights than version 0:3: digest " in rig.words[-1]
        await rig.store(2)  # for both of them
        await asyncio.gather(rig.read(0), rig.read(1))
        await rig.serve(0, 1, 2)

    run(tmp_path, scenario)


def test_what_a_newcomer_cannot_read_is_not_given_to_the_next_one(tmp_path):
    async def scenario(rig):
        await rig.back(1)
        await rig.store(0)
        await rig.read(1, error="StoredError: rank_0_0.safetensors: a is damaged")
        assert await rig.desk.changed.until(lambda: rig.membership.to_send == (1,), 5)
        assert "sampler 1 could not be seeded: StoredError: rank_0_0.safetensors: a is damaged" in rig.words[-1]
        rig.desk.died(2, "sampler 2 was ended by SIGKILL")
        rig.samplers[0].calls.clear()
        rig.join(2)
        await rig.store(0)
        await rig.read(2)
        await rig.serve(0, 2)

    run(tmp_path, scenario)


def test_a_newcomer_that_read_other_weights_does_not_serve(tmp_path):
    async def scenario(rig):
        await rig.back(1)
        await rig.store(0)
        await rig.read(1, share=5)
        assert await rig.desk.changed.until(lambda: rig.membership.reasons["mismatch"] == 1, 5)
        rig.samplers[1].calls.clear()
        assert rig.membership.serving == (0, 2)
        assert f"sampler 1 read other weights than version 0:3: digest 10, not {DIGEST}" in rig.words
        await rig.read(1)  # it is tried once more, from the same files,
        await rig.serve(0, 1, 2)
        assert [verb for verb, _ in rig.samplers[1].calls] == ["fence", "load", "commit"]  # and not before it has heard of it

    run(tmp_path, scenario)


def test_nobody_is_seeded_where_nobody_serves(tmp_path):
    async def scenario(rig):
        await rig.back(0, 1, 2)
        await asyncio.sleep(0.1)
        assert rig.membership.to_send == (0, 1, 2)
        assert rig.membership.to_seed == ()
        assert all(sampler.verbs() == [] for sampler in rig.samplers)

    run(tmp_path, scenario)
