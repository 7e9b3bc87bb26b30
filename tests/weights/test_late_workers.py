"""Workers that come to every group and are late in the midst of the transfer, over gloo, each a process of its own; what they
and the trainer say of it is told to the orchestrator's part, as they would."""

import asyncio
import multiprocessing
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Connection

import pytest
import torch
from lane_ranks import Fault, Result
from lane_stage import Stage, check, large

from prl.control.server import Member
from prl.flow.halts import Halt
from prl.flow.membership import Membership, MembershipSettings
from prl.flow.versions import Version
from prl.orchestrator import lateness
from prl.orchestrator.replicas import ReplicaDesk
from prl.orchestrator.update import Update
from prl.weights.crew import Crew
from prl.weights.digest import digest
from prl.weights.group import TransportError
from prl.weights.options import WeightsOptions
from prl.weights.transport import SamplerEnd, TrainerEnd, spec_of

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
UPDATE_S = 6.0  # a deadline that is waited for
LATE_S = UPDATE_S + 1.0
LONG = replace(large(), bucket_bytes=2**22)  # 8 buckets from each root: more than are under way and in sockets at a time
SETTINGS = MembershipSettings(replicas=3, restarts=1, pause_s=1.0, start_s=60.0)
Told = dict[int, Halt | None]  # by replica of one worker: where it left; without those that say nothing


class Desk:
    """The orchestrator's view of replicas of one worker each; none is asked anything."""

    def __init__(self, replicas: int) -> None:
        self.membership = Membership(SETTINGS)
        self.words: list[str] = []
        self._desk = ReplicaDesk(self.membership, tell=self._tell, on_change=self.words.append)
        for index in range(replicas):
            self._desk.joined(Member("sampler", index, facts={"url": "http://nowhere", "workers": 1}))

    async def _tell(self, replica: object, words: str) -> None:
        pass

    async def _blame(self, transport: str, told: Told, overdue: bool) -> None:
        update = Update(Version(0, 1), self.membership.epoch, self._desk.group, 0.0, transport)
        for index, halt in told.items():
            update.leaves(index, 0, None if halt is None else asdict(halt))
        assert update.overdue or overdue
        await lateness.blame(update, self._desk, UPDATE_S)
        await self._desk.close()

    def blame(self, transport: str, told: Told, overdue: bool) -> None:
        asyncio.run(self._blame(transport, told, overdue))


@pytest.fixture(scope="module")
def stage():
    stage = Stage(5)
    yield stage
    stage.end()


def told(crew: Crew, results: dict[int, Result]) -> tuple[Told, bool]:
    workers = {sampler: results.get(crew.worker(sampler, 0)) for sampler in crew.samplers}
    assert all(result is None or result.error for result in workers.values())  # nobody has it all
    overdue = any(result.halt is not None and result.halt.overdue for result in results.values())
    return {sampler: result.halt for sampler, result in workers.items() if result is not None}, overdue


def test_by_lanes_who_does_not_say_where_it_is_is_fenced_at_once(stage, monkeypatch):
    monkeypatch.setattr(lateness, "ANSWER_S", 0.5)
    desk = Desk(2)
    crew = stage.crew(2, [0, 1], 1)
    victim = crew.worker(1, 0)
    stage.open(LONG, crew)
    stage.begin(crew, 1, UPDATE_S, {victim: Fault("late", 0, 2 * UPDATE_S)})
    began = time.monotonic()
    desk.blame("lanes", *told(crew, stage.results(crew, [victim])))
    assert time.monotonic() - began < 2 * UPDATE_S
    assert desk.membership.reasons == {"late": 1}
    assert "sampler 1 did not say within 6 s what became of version 0:1: waited for worker 0" in desk.words
    assert stage.ranks[victim].answer().halt.overdue  # and it is of use in another test


def test_by_lanes_who_is_late_in_two_transfers_is_fenced_and_the_others_get_the_version(stage):
    """It wakes up, and says that it has left, a moment after the deadline; the next group has it again."""
    desk = Desk(3)
    for again in (False, True):
        crew = stage.crew(2, [0, 1, 2], 1)
        stage.open(LONG, crew)
        stage.begin(crew, 1, UPDATE_S, {crew.worker(1, 0): Fault("late", 0, LATE_S)})
        desk.blame("lanes", *told(crew, stage.results(crew)))
        assert desk.membership.reasons == ({"late": 1} if again else {})
        assert desk.membership.group == ((0, 2) if again else (0, 1, 2))
    assert all("sampler 1 held up version 0:1: others had waited" in words for words in desk.words[3:])
    left = stage.crew(2, [0, 2], 1)
    stage.ranks.append(stage.ranks.pop(3))
    stage.open(LONG, left)
    check(LONG, left, stage.update(left, 2), 2)


def test_by_lanes_a_trainer_rank_that_is_late_is_no_samplers_fault(stage):
    desk = Desk(2)
    for _ in range(2):
        crew = stage.crew(2, [0, 1], 1)
        stage.open(LONG, crew)
        stage.begin(crew, 1, UPDATE_S, {1: Fault("late", 1, LATE_S)})
        desk.blame("lanes", *told(crew, stage.results(crew)))
    assert (desk.membership.group, desk.words[2:]) == ((0, 1), [])


def version() -> dict[str, torch.Tensor]:
    """More in each tensor than the sockets between two processes hold."""
    return {name: torch.full((2**20,), float(number)) for number, name in enumerate("abc")}


def sampler(port: int, pipe: Connection) -> None:
    """Told by the pipe which rank of how many it is in which epoch, and how long it is elsewhere before the second tensor."""
    specs = [spec_of(name, tensor) for name, tensor in version().items()]
    while (order := pipe.recv()) != "end":
        rank, ranks, epoch, late_s = order
        end = SamplerEnd(HOST, port, rank, ranks, epoch, 60.0)
        found = {}
        try:
            for spec, tensor in end.arriving(specs, 2**20, UPDATE_S):
                time.sleep(late_s if not found else 0.0)
                found[spec.name] = tensor
            pipe.send(digest(found))
        except TransportError as error:
            pipe.send(error.halt)
        end.close()


def test_gathered_who_is_late_in_two_transfers_is_fenced_and_the_others_get_the_version():
    spawn = multiprocessing.get_context("spawn")
    trainer = TrainerEnd(HOST, WeightsOptions(bucket_mib=1, group_s=60.0, update_s=UPDATE_S))
    pipes, processes = [], []
    for _ in range(3):
        mine, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=sampler, args=(trainer.master_port, theirs), daemon=True))
        processes[-1].start()
        pipes.append(mine)
    desk = Desk(3)
    try:
        for epoch in (1, 2, 3):
            group = desk.membership.group
            assert group == ((0, 1, 2) if epoch < 3 else (0, 2))
            for rank, index in enumerate(group, 1):
                pipes[index].send((rank, 1 + len(group), epoch, LATE_S * (index == 1)))
            trainer.join(epoch, 1 + len(group))
            overdue, sent = False, None
            try:
                sent = trainer.send(version()).digest
            except TransportError as error:
                overdue = error.overdue
            assert all(pipes[index].poll(30) for index in group)
            answers = {index: pipes[index].recv() for index in group}
            if epoch < 3:
                desk.blame("gather", answers, overdue)
                assert "sampler 1 held up version 0:1: others had waited" in desk.words[-1]
        assert set(answers.values()) == {sent, digest(version())}
        assert desk.membership.reasons == {"late": 1}
    finally:
        for process in processes:
            process.kill()
