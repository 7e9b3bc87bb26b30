"""An actor between a real control server, real streams and servers that stand in for samplers."""

import asyncio
import math
import re
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import pytest
from stand_in import TOKEN, SamplerStandIn, choice, reply, until

from prl.actor.loop import Actor, Parts
from prl.actor.options import ActorOptions
from prl.actor.publisher import rollout_publisher
from prl.actor.sampler_client import SamplerClient
from prl.actor.tasks import Task, load_tasks
from prl.actor.tokenizer import ModelTokenizer
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.server import Bell, ControlServer
from prl.domains import digits
from prl.domains.api import Context, DomainError, Problem
from prl.domains.options import DomainOptions
from prl.domains.registry import Domain
from prl.flow.ids import Lease
from prl.metrics.events import MetricsWriter, read_events
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.streams.options import StreamsOptions
from prl.streams.reader import read_rollouts
from prl.streams.records import Rollout
from prl.trainer.options import ModelOptions
from prl.verifier.client import VerifierClient


class Orchestrator:
    """Hands out what a test puts in `leases` and notes what comes back."""

    def __init__(self, wanted):
        self.leases = []
        self.asked = []  # groups wanted, of each lease call
        self.announcements = []
        self.failed = []
        self.evaluations = []
        self.samplers = []
        self.wanted_groups = wanted
        self.discarded = []
        self.verifier_url = None
        self.stop = False
        self.working = None  # the actor's task
        self.bell = Bell()

    async def lease(self, member, body):
        self.asked.append(body["groups"])
        await self.bell.until(lambda: self.leases or self.stop, 5.0)
        taken, self.leases = self.leases[: body["groups"]], self.leases[body["groups"] :]
        leases = [asdict(lease) for lease in taken]
        return {"leases": leases, "stop": self.stop}

    async def samplers_that_serve(self, member, body):
        def serving():
            return [[k, s.url] for k, s in enumerate(self.samplers) if s is not None]

        await self.bell.until(lambda: serving() != body["known"] or self.stop, 5.0)
        return {"samplers": serving()}

    async def verifier(self, member, body):
        await self.bell.until(lambda: self.verifier_url != body["known"] or self.stop, 5.0)
        return {"url": self.verifier_url}

    async def wanted(self, member, body):
        await self.bell.until(lambda: self.wanted_groups != body["known"] or self.stop, 5.0)
        return {"groups": self.wanted_groups, "stop": self.stop}

    async def rollouts(self, member, body):
        self.announcements.append(body)
        return {"late": []}

    async def group_failed(self, member, body):
        self.failed.append(body)
        return {}

    async def discard(self, member, body):
        self.discarded += body["discarded"]
        return {}

    async def evaluation(self, member, body):
        self.evaluations.append(body)
        return {}

    def end(self):
        self.stop = True
        self.bell.ring()

    def want(self, groups):
        self.wanted_groups = groups
        self.bell.ring()

    def offer(self, *leases):
        self.leases += leases
        self.bell.ring()

    @property
    def groups(self):
        return [group["group"] for announcement in self.announcements for group in announcement["groups"]]


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    write_model_folder(ModelOptions(init="random", architecture="qwen2"), run.model)
    return run


@asynccontextmanager
async def actor_at_work(run, *samplers, tasks=None, enough=None, streams=None, wanted=1, **options):
    """The orchestrator of a running actor, who wants every group at once unless told otherwise; the actor is awaited at the
    end."""
    orchestrator = Orchestrator(wanted)
    orchestrator.samplers = list(samplers)
    calls = ("lease", "verifier", "wanted", "rollouts", "group_failed", "evaluation", "discard")
    handlers = {name: getattr(orchestrator, name) for name in calls} | {"samplers": orchestrator.samplers_that_serve}
    server = ControlServer(TOKEN, handlers, on_join=lambda member: None, on_fail=lambda *_: None)
    url = await server.start("127.0.0.1")
    tasks = tasks or load_tasks([DomainOptions(name="digits")], 1, ModelTokenizer(run.model), None)
    try:
        with MetricsWriter(run.metrics, "actor", 0, 1) as metrics:
            async with (
                ControlClient(url, TOKEN, "actor", 0, ControlOptions()) as control,
                SamplerClient(TOKEN, request_s=5, max_model_len=64, max_answers=512, vocabulary=16) as samplers,
                VerifierClient(TOKEN, deadline_s=5) as verifier,
            ):
                publisher = rollout_publisher(run, "a run", 1, control, streams or StreamsOptions(), ControlOptions())
                parts = Parts(tasks, control, samplers, verifier, publisher, metrics)
                async with asyncio.timeout(30):
                    working = asyncio.create_task(Actor(parts, ActorOptions(**options), call_s=20, enough=enough).run())
                    orchestrator.working = working
                    try:
                        yield orchestrator
                        orchestrator.end()
                        await working
                    finally:
                        working.cancel()
    finally:
        await server.close()


def train(group, rollouts=4, issue=0, index=None):
    return Lease("train", "digits", group if index is None else index, 0, group, issue, rollouts)


def solve(body):
    """The right answer to every digits prompt, in the model folder's documented ids."""
    answer = [*((d + 1) % 10 for d in body["token_ids"][:4]), 11]
    return reply([choice(answer, spans=[("0:7", 0, 2), ("0:8", 2, 5)])] * body["sampling_params"]["n"])


def read_groups(run, orchestrator):
    files = [read_rollouts(run.path / a["path"], a["bytes"], a["checksum"], run="a run") for a in orchestrator.announcements]
    return {group.group: group for groups in files for group in groups}


def test_leased_groups_come_back_as_announced_files(run):
    async def scenario():
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler) as orchestrator:
            orchestrator.offer(*(train(n) for n in range(40)))
            await until(lambda: len(orchestrator.groups) == 40)
            assert len(sampler.bodies) == 40  # one request a group
            assert max(orchestrator.asked) == 32  # lease_groups
        return orchestrator

    orchestrator = asyncio.run(scenario())
    groups = read_groups(run, orchestrator)
    assert sorted(groups) == list(range(40))
    problems = digits.training_problems()
    for number, group in groups.items():
        assert (group.problem, group.domain, group.issue, len(group.rollouts)) == (f"digits/{number}", "digits", 0, 4)
        for rollout in group.rollouts:
            assert rollout.reward == 1.0
            (turn,) = rollout.turns
            assert "".join(map(str, turn.prompt_ids[:4])) + "=" == problems[number].data["prompt"]
            assert [str(span.version) for span in turn.versions] == ["0:7", "0:8"]
    sequences = [a["sequence"] for a in orchestrator.announcements]
    assert sequences == list(range(len(sequences)))
    assert {a["writer"] for a in orchestrator.announcements} == {"actor-000"}


def test_no_group_waits_for_another(run):
    """The first group's sampler does not answer; the others end, are announced, and others are leased in their place."""

    async def scenario():
        slow = digits.training_problems()[0].data["prompt"]
        slow_ids = [*map(int, slow[:4]), 10]
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler, max_groups=2) as orchestrator:
            sampler.hold, sampler.holds = asyncio.Event(), lambda body: body["token_ids"] == slow_ids
            orchestrator.offer(*(train(n) for n in range(10)))
            await until(lambda: len(orchestrator.groups) == 9)
            assert 0 not in orchestrator.groups
            sampler.hold.set()
            await until(lambda: len(orchestrator.groups) == 10)
            assert max(orchestrator.asked) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["stands still", "dies"])
def test_what_waits_at_a_sampler_that_is_gone_is_asked_elsewhere_within_its_lease(run, monkeypatch, how):
    """Though the actor has no room left, and so leases nothing by which it would hear of it."""
    monkeypatch.setattr("prl.actor.sampler_client._LEAVING_S", 0.2)

    async def scenario():
        async with (
            SamplerStandIn(solve) as gone,
            SamplerStandIn(solve) as other,
            actor_at_work(run, gone, other, max_groups=2) as orchestrator,
        ):
            gone.hold = asyncio.Event()
            orchestrator.offer(train(1), train(2))
            await until(lambda: gone.bodies and other.bodies)
            if how == "dies":
                await gone.__aexit__()
            orchestrator.samplers[0] = None
            orchestrator.bell.ring()
            await until(lambda: len(orchestrator.groups) == 2)
            assert len(orchestrator.asked) <= 2
            await asyncio.sleep(1.2)  # for a line of metrics
        return orchestrator

    orchestrator = asyncio.run(scenario())
    groups = read_groups(run, orchestrator)
    assert sorted(orchestrator.groups) == sorted(groups) == [1, 2]  # each once,
    assert all(group.issue == 0 and len(group.rollouts) == 4 for group in groups.values())
    assert {turn.replica for group in groups.values() for rollout in group.rollouts for turn in rollout.turns} == {1}
    events = read_events(run.metrics / "actor-0.jsonl")[0]
    assert max(event.values.get("actor/errors/retried", 0) for event in events) >= 1
    assert orchestrator.failed == orchestrator.discarded == []


def test_the_end_of_the_run_keeps_what_is_done_and_drops_the_rest(run):
    async def scenario():
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler) as orchestrator:
            orchestrator.offer(train(0), train(1))
            await until(lambda: len(sampler.bodies) == 2)
            sampler.hold = asyncio.Event()
            orchestrator.offer(train(2))
            await until(lambda: len(sampler.bodies) == 3)
            orchestrator.end()
            await until(lambda: sampler.dropped == 1)
        assert sorted(orchestrator.groups) == [0, 1]
        assert not orchestrator.failed

    asyncio.run(scenario())


def test_evaluations_sample_every_held_out_problem_once_at_temperature_one(run):
    async def scenario():
        held_out = digits.evaluation_problems()

        nothing_right = choice([10] * 5, finish_reason="length", spans=[("1:9", 0, 5)])

        def answer(body):  # right where the last digit is even
            even = body["token_ids"][3] % 2 == 0
            return solve(body) if even else reply([nothing_right] * body["sampling_params"]["n"])

        async with SamplerStandIn(answer) as sampler, actor_at_work(run, sampler, temperature=0.5, top_p=0.9) as orchestrator:
            orchestrator.offer(Lease("evaluate", "digits", 0, 20, -1, 2, 512), train(0))
            await until(lambda: orchestrator.evaluations and orchestrator.groups)
            prompts = [tuple(b["token_ids"]) for b in sampler.bodies if b["sampling_params"]["temperature"] == 1.0]
            assert sorted(prompts) == sorted((*map(int, p.data["prompt"][:4]), 10) for p in held_out)
            others = [b["sampling_params"] for b in sampler.bodies if b["sampling_params"]["temperature"] != 1.0]
            assert [(o["temperature"], o["top_p"], o["n"]) for o in others] == [(0.5, 0.9, 4)]
        (result,) = orchestrator.evaluations
        right = sum(int(p.data["prompt"][3]) % 2 == 0 for p in held_out) / 512
        assert result["reward_mean"] == pytest.approx(right)
        assert result["reward_std"] == pytest.approx((right * (1 - right)) ** 0.5)
        expected = {"group": -1, "issue": 2, "problems": 512, "output_tokens": 5 * 512}
        expected |= {"version_start": "0:7", "version_end": "1:9"}
        assert expected.items() <= result.items()
        assert orchestrator.groups == [0]

    asyncio.run(scenario())


def test_a_rollout_is_tried_again_and_then_its_group_is_given_up(run):
    async def scenario():
        bad = [*map(int, digits.training_problems()[1].data["prompt"][:4]), 10]
        tries = []

        def answer(body):
            whole = solve(body)
            if body["token_ids"] == bad:
                tries.append(body["sampling_params"]["n"])
                whole["answers"][0] = {}  # one malformed answer a request
            return whole

        async with SamplerStandIn(answer) as sampler, actor_at_work(run, sampler) as orchestrator:
            orchestrator.offer(train(0), train(1, issue=3), train(2))
            await until(lambda: orchestrator.failed and len(orchestrator.groups) == 2)
        assert tries == [4, 1, 1]
        assert sorted(orchestrator.groups) == [0, 2]
        (failed,) = orchestrator.failed
        assert (failed["group"], failed["issue"], failed["reason"]) == (1, 3, "sampler_malformed")

    asyncio.run(scenario())


def test_a_group_has_a_deadline(run):
    async def scenario():
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler, rollout_s=0.3) as orchestrator:
            sampler.hold = asyncio.Event()
            orchestrator.offer(train(0), Lease("evaluate", "digits", 0, 0, -1, 0, 3))
            await until(lambda: len(orchestrator.failed) == 2)
        assert {(f["group"], f["reason"]) for f in orchestrator.failed} == {(0, "rollout_deadline"), (-1, "rollout_deadline")}

    asyncio.run(scenario())


def test_a_domain_that_sleeps_for_ever_fails_its_group_alone(run):
    solvable, known = digits.training_problems()[0], Context(ModelTokenizer(run.model), None)
    calls = []

    async def generate_rollout(problem, sampler, context):
        calls.append(problem)
        if len(calls) <= 4:  # the first group's
            await asyncio.Event().wait()
        return await digits.generate_rollout(solvable, sampler, known)

    async def scenario():
        async with (
            SamplerStandIn(solve) as sampler,
            actor_at_work(run, sampler, tasks=domain_of(generate_rollout), rollout_s=0.5) as orchestrator,
        ):
            orchestrator.offer(train(0), train(1))
            await until(lambda: orchestrator.failed and orchestrator.groups)
        assert [(f["group"], f["reason"]) for f in orchestrator.failed] == [(0, "rollout_deadline")]
        assert orchestrator.groups == [1]

    asyncio.run(scenario())


@pytest.mark.parametrize("trouble", ["one fails", "one is late", "both"])
def test_a_group_is_handed_in_without_the_rollouts_that_failed_or_were_late(run, trouble):
    solvable, known = digits.training_problems()[0], Context(ModelTokenizer(run.model), None)
    calls = []

    async def generate_rollout(problem, sampler, context):
        number = len(calls)
        calls.append(number)
        if number == 1 and trouble != "one is late":
            raise KeyError("a fault of the domain's own")
        if number == 2 and trouble != "one fails":
            await asyncio.Event().wait()
        return await digits.generate_rollout(solvable, sampler, known)

    async def score_group(problem, rollouts, context):
        return [replace(rollout, reward=float(k)) for k, rollout in enumerate(rollouts)]

    async def scenario():
        tasks = domain_of(generate_rollout, score_group)
        async with (
            SamplerStandIn(solve) as sampler,
            actor_at_work(run, sampler, tasks=tasks, enough=3, rollout_s=0.5) as orchestrator,
        ):
            orchestrator.offer(train(7))
            await until(lambda: orchestrator.groups or orchestrator.failed)
        return orchestrator

    orchestrator = asyncio.run(scenario())
    if trouble == "both":
        assert [(f["group"], f["reason"]) for f in orchestrator.failed] == [(7, "domain_KeyError")]
        assert not orchestrator.groups
        return
    missing, reason = (1, "domain_KeyError") if trouble == "one fails" else (2, "rollout_deadline")
    assert orchestrator.discarded == [[0, "digits/7", 7, 0, [missing], reason]]
    group = read_groups(run, orchestrator)[7]
    assert group.numbers == tuple(k for k in range(4) if k != missing)
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, 2.0]


def test_an_actor_that_has_no_room_hears_at_once_that_a_step_waits(run):
    """All its groups are in flight, so that it leases none; what it has finished is published."""

    async def scenario():
        streams = StreamsOptions(roll_s=1000, roll_groups=1000)
        async with (
            SamplerStandIn(solve) as sampler,
            actor_at_work(run, sampler, streams=streams, wanted=None, max_groups=2) as orchestrator,
        ):
            orchestrator.offer(train(0), train(1))
            await until(lambda: len(sampler.bodies) == 2)
            sampler.hold = asyncio.Event()
            orchestrator.offer(train(2), train(3))
            await until(lambda: len(sampler.bodies) == 4)
            await asyncio.sleep(0.1)
            assert not orchestrator.groups
            assert not orchestrator.leases
            orchestrator.want(3)  # more than it has; it hears of fewer as well
            await asyncio.sleep(0.1)
            assert not orchestrator.groups
            orchestrator.want(2)
            began_s = time.monotonic()
            await until(lambda: sorted(orchestrator.groups) == [0, 1])
            assert time.monotonic() - began_s < 1.0  # some ms where nobody else computes
            sampler.hold.set()
            await until(lambda: sorted(orchestrator.groups) == [0, 1, 2, 3])

    asyncio.run(scenario())


def domain_of(generate_rollout, score_group=None):
    domain = Domain("digits", lambda *_: [], generate_rollout, score_group, None, None, needs_verifier=False)
    return {"digits": Task(domain, Context(None, None), [Problem({})] * 100, [])}


@pytest.mark.parametrize("where", ["generate_rollout", "score_group", "a reward that is no number"])
def test_a_domain_that_only_fails_ends_the_actor_with_its_cause(run, where):
    solvable, known = digits.training_problems()[0], Context(ModelTokenizer(run.model), None)

    async def generate_rollout(problem, sampler, context):
        if where == "generate_rollout":
            raise KeyError("a fault of the domain's own")
        return await digits.generate_rollout(solvable, sampler, known)

    async def score_group(problem, rollouts, context):
        if where == "score_group":
            raise DomainError("a fault of the domain's own")
        return ["a fault of the domain's own"] * len(rollouts)

    async def scenario():
        async with (
            SamplerStandIn(solve) as sampler,
            actor_at_work(run, sampler, tasks=domain_of(generate_rollout, score_group)) as orchestrator,
        ):
            orchestrator.offer(*(train(n) for n in range(30)))
            await asyncio.wait([orchestrator.working])

    with pytest.raises(RuntimeError, match=r"16 groups in a row failed.*a fault of the domain's own"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "status", "words"),
    [
        ([999_999], 400, "999999"),
        ([-1], 400, "-1"),
        ([3], 400, "answered 400"),
        ([3], 404, "answered 404"),
        ([3] * 64, 200, "64"),
    ],
)
def test_requests_that_are_refused_end_the_actor_with_their_cause(run, caplog, prompt, status, words):
    """Each is asked once: neither its rollouts nor the log go round in circles."""

    async def generate_rollout(problem, sampler, context):
        return Rollout((await sampler.generate(prompt),), 1.0)

    async def scenario():
        async with (
            SamplerStandIn(lambda body: status) as sampler,
            actor_at_work(run, sampler, tasks=domain_of(generate_rollout)) as orchestrator,
        ):
            orchestrator.offer(*(train(n) for n in range(16)))
            await asyncio.wait([orchestrator.working])
            assert len(orchestrator.failed) == 16
            assert {f["reason"] for f in orchestrator.failed} == {"sampler_too_long" if status == 200 else "sampler_refused"}
            assert len(sampler.bodies) <= 1  # one prompt, asked for in one turn of the loop

    with pytest.raises(RuntimeError, match=rf"16 groups in a row failed.*{words}"):
        asyncio.run(scenario())
    assert len([record for record in caplog.records if "failed" in record.message]) <= 2


def cancel(rollout):
    raise asyncio.CancelledError


def nothing_sampled(turn):
    return turn._replace(output_ids=turn.output_ids[:0], logprobs=turn.logprobs[:0], versions=())


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("train", lambda r: replace(r, reward=math.nan), r"rollout 2 of 4: the reward must be .* got nan"),
        ("train", lambda r: replace(r, reward=1e300), r"rollout 2 of 4: the reward must be .* got 1e\+300"),
        ("train", lambda r: replace(r, reward=10**400), r"rollout 2 of 4: the reward must be .* got 1000"),
        ("train", lambda r: replace(r, reward="1.0"), r"rollout 2 of 4: the reward must be .* got '1.0'"),
        ("train", lambda r: replace(r, reward=None), r"rollout 2 of 4: the reward must be .* got None"),
        ("train", lambda r: replace(r, metrics={"x": "y"}), r"rollout 2 of 4: metric 'x' must be .* got 'y'"),
        ("train", lambda r: replace(r, turns=()), r"rollout 2 of 4: expected turns .* got \(\)"),
        ("evaluate", cancel, r"RuntimeError: the domain's code cancelled itself"),
        ("train", cancel, r"RuntimeError: the domain's code cancelled itself"),
        ("train", lambda r: None, r"rollout 2 of 4: expected a Rollout, got None"),
        (
            "train",
            lambda r: replace(r, turns=(r.turns[0]._replace(versions=()),)),
            r"StreamError: .*rollout 2: 5 output",
        ),
        ("train", lambda r: replace(r, turns=(r.turns[0]._replace(output_ids=[1]),)), r"rollout 2 of 4: expected turns"),
        ("evaluate", lambda r: replace(r, turns=(nothing_sampled(r.turns[0]),)), "without one output token"),
    ],
)
def test_a_rollout_that_is_none_fails_its_group_alone(run, caplog, kind, change, words):
    solvable, known = digits.training_problems()[0], Context(ModelTokenizer(run.model), None)

    async def generate_rollout(problem, sampler, context):
        if change is cancel and kind == "train" and not scored:  # else in score_group
            cancel(None)
        return await digits.generate_rollout(solvable, sampler, known)

    async def score_group(problem, rollouts, context):
        bad = 0 if kind == "evaluate" else 2
        return [change(r) if k == bad and not scored else r for k, r in enumerate(rollouts)]

    scored = []

    async def scenario():
        tasks = domain_of(generate_rollout, score_group)
        tasks["digits"] = replace(tasks["digits"], evaluate=[Problem({})])
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler, tasks=tasks) as orchestrator:
            orchestrator.offer(train(7) if kind == "train" else Lease("evaluate", "digits", 0, 0, 7, 0, 1))
            await until(lambda: orchestrator.failed)
            scored.append(True)
            orchestrator.offer(train(8))
            await until(lambda: orchestrator.groups)
        assert [f["group"] for f in orchestrator.failed] == [7]
        assert orchestrator.groups == [8]

    asyncio.run(scenario())
    assert re.search(words, caplog.text)


def test_metrics(run):
    async def scenario():
        async with SamplerStandIn(solve) as sampler, actor_at_work(run, sampler) as orchestrator:
            orchestrator.offer(train(0), Lease("train", "digits", 99_999, 0, 1, 0, 4))  # a problem that is not there
            await until(lambda: orchestrator.groups and orchestrator.failed)
            await asyncio.sleep(1.2)

    asyncio.run(scenario())
    events, _ = read_events(run.metrics / "actor-0.jsonl")
    scalars = [event.values for event in events if event.kind == "scalars"]
    assert sum(values["actor/rollouts_per_s"] for values in scalars) > 0
    assert scalars[-1]["actor/errors/group_unknown_problem"] == 1
    assert all(0 <= values["actor/loop_lag_s"] < 5 for values in scalars)
    assert [event.labels["name"] for event in events if event.kind == "phase"] == ["first rollout request"]
