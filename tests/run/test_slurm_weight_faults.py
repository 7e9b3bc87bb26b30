"""Samplers on nodes of their own that fail in the midst of an update: the engine of one stands still or is killed, its network
is cut or slows to a crawl, a byte changes on its way to it. Each is out of the group within its deadlines, the run goes on with
the other one, and whoever comes back serves what the trainer holds.

The nodes' networks are slow, so that a version is seconds on its way, and their sockets hold little of it, as they do of one of
many gigabytes.
"""

import itertools
import json
import os
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lab_cluster
import psutil
import pytest
import torch
from children import children_of
from lab_runs import LabRun, submitted
from safetensors.torch import load_file
from struck_runs import served_after
from transformers import AutoModelForCausalLM
from whole_runs import Ended

from prl.control.token import authorization, read_token
from prl.metrics.events import Event
from prl.report.audit import audit, render
from prl.weights.digest import digest

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.slurm_netns]
TESTS = Path(__file__).parents[1]
START_S = 300.0  # from a start to its steps on two busy cores
DEADLINE_S = 12.0  # of the building of a group, and of each part of an update
ANSWER_S = 10.0  # to be heard, and to be told, on busy cores
LASTING = (
    *("run.steps=100000", "run.stop_at_reward=null", "run.evaluate_every_steps=0", "sample.restarts=10"),
    *("weights.transport=lanes", f"weights.group_s={DEADLINE_S:g}", f"weights.update_s={DEADLINE_S:g}"),
    "cluster.preflight.bandwidth_mib_per_s=0.1",  # with small buffers, on busy cores
    # A node that is cut off is back before anybody but those who send weights gives it up.
    "control.lost_after_s=120",
    "cluster.environment.VLLM_SERVER_DEV_MODE=1",  # /collective_rpc, for the extension
)
PROMPTS = [[*(int(digit) for digit in f"{number:04}"), 10] for number in range(17, 10_000, 997)]  # "0017="
RATE, CRAWL = "2mbit", "8kbit"  # a version of half a megabyte takes 2 s, or eight minutes


@dataclass(frozen=True)
class Sampler:
    """A replica, and who stands for it now."""

    run: LabRun
    index: int
    node: str

    @property
    def server(self) -> psutil.Process:
        return children_of(self.run.agent(self.node).pid, self.run.folder)[f"sampler {self.index}"]

    @property
    def engine(self) -> psutil.Process:
        (found,) = [child for child in self.server.children() if any("EngineCore" in word for word in child.cmdline())]
        return found

    def post(self, path: str, body: dict) -> dict:
        environment = self.server.environ()
        url = f"http://{environment['PRL_HOST']}:{environment['PRL_PORT']}{path}"
        headers = authorization(read_token(self.run.folder.token)) | {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read() or "null")


def samplers(run: LabRun) -> list[Sampler]:
    plan = json.loads(run.folder.plan(1).read_text())
    names = [node["name"] for node in plan["nodes"]]
    places = {child["index"]: names[child["node"]] for child in plan["children"] if child["role"] == "sampler"}
    return [Sampler(run, index, places[index]) for index in sorted(places)]


def events(run: LabRun, kind: str) -> list[Event]:
    return Ended(run.folder, 0, "").events(kind)


def wait_for_steps(run: LabRun, step: int) -> None:
    def there() -> bool:
        assert not run.folder.exit(1).exists(), run.logs(1)
        return any(event.step >= step for event in events(run, "step"))

    lab_cluster.wait_until(there, START_S, lambda: run.logs(1))


def wait_for_samplers(run: LabRun, since: float, condition: Callable[[Event], bool], deadline_s: float = START_S) -> Event:
    def found() -> list[Event]:
        return [event for event in events(run, "samplers") if event.time > since and condition(event)]

    lab_cluster.wait_until(found, deadline_s, lambda: [event.labels["event"] for event in events(run, "samplers")])
    return found()[0]


def wait_for_transfer(sampler: Sampler) -> None:
    """Until a version is in the midst of its way to the sampler."""

    def arrives() -> bool:
        before = lab_cluster.received_bytes(sampler.node)
        time.sleep(0.3)
        return lab_cluster.received_bytes(sampler.node) - before > 40_000

    lab_cluster.wait_until(arrives, 60, lambda: "no version comes")


@dataclass(frozen=True)
class Blow:
    """What a sampler meets in the midst of an update."""

    kind: str
    victim: int
    strike: Callable[[Sampler], None]
    within_s: float  # so soon it serves no more
    reasons: tuple[str, ...]
    restarts: int = 1
    mend: Callable[[Sampler], None] = lambda _: None


def corrupt(sampler: Sampler) -> None:
    sampler.post("/collective_rpc", {"method": "flip_next_bucket"})


# A sampler that does not take what is sent to it ends the transfer at the deadline of that; who does not come to the next group
# within the deadline of its building is known to be at fault.
BLOWS = (
    Blow("stop", 1, lambda sampler: sampler.engine.suspend(), 2 * DEADLINE_S, ("late",)),
    Blow("corrupt byte", 0, corrupt, 2 * DEADLINE_S, ("mismatch",), restarts=0),
    Blow("kill", 0, lambda sampler: sampler.engine.kill(), DEADLINE_S, ("died", "failed", "unreachable")),
    Blow(
        "cut",
        1,
        lambda sampler: lab_cluster.to_node("cut", sampler.node),
        2 * DEADLINE_S,
        ("late", "unreachable"),
        mend=lambda sampler: lab_cluster.to_node("heal", sampler.node),
    ),
    Blow(
        "late",
        1,
        lambda sampler: lab_cluster.slow_down(sampler.node, CRAWL),
        2 * DEADLINE_S,
        ("late", "unreachable"),
        mend=lambda sampler: lab_cluster.slow_down(sampler.node, RATE),
    ),
)


@pytest.mark.deadline(1800)
def test_samplers_that_fail_in_an_update_are_left_out_and_come_back(tmp_path, nodes, monkeypatch):
    inject = [str(TESTS / "faults" / "inject"), str(TESTS / "sampler"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(inject))
    monkeypatch.setenv("PRL_FAULTS_WORKER", "faulty_extension.FaultyExtension")
    patient = lab_cluster.configured("SlurmdTimeout=300")  # Slurm, too, misses no node that is cut off for a while
    with patient, lab_cluster.small_buffers(nodes), submitted(tmp_path / "run", nodes, *LASTING, sampling=2) as run:
        wait_for_steps(run, 5)
        both = samplers(run)
        with lab_cluster.slow([sampler.node for sampler in both], RATE):
            back = [(blow.victim, check_blow(run, blow, both[blow.victim]).time) for blow in BLOWS]
        answers = stop_and_ask(run, both)
        assert run.ended().outcome == "done"
        check_answers(run, answers)
        check_records(run, back)


def check_blow(run: LabRun, blow: Blow, victim: Sampler) -> Event:
    """The event with which all samplers serve again."""
    wait_for_transfer(victim)
    before, struck = events(run, "samplers")[-1].values, time.time()
    blow.strike(victim)
    try:
        left = wait_for_samplers(run, struck, lambda event: event.values["samplers/serving"] == 1)
    finally:
        blow.mend(victim)
    back = wait_for_samplers(run, left.time, lambda event: event.values["samplers/serving"] == 2)
    wait_for_steps(run, events(run, "step")[-1].step + 5)
    new = Counter(back.values)
    new.subtract(before)
    times = [struck, *(event.time for event in events(run, "step") if event.time > struck)]
    longest_s = max(later - earlier for earlier, later in itertools.pairwise(times))
    assert left.time - struck < blow.within_s + ANSWER_S, (blow.kind, left)
    assert sum(new[f"samplers/fenced_{reason}"] for reason in blow.reasons) == 1, (blow.kind, new)
    assert new["samplers/restarts"] == blow.restarts, (blow.kind, new)
    assert longest_s < blow.within_s + ANSWER_S, blow.kind  # the trainer, too, waits no longer
    return back


def stop_and_ask(run: LabRun, both: list[Sampler]) -> list[list[dict]]:
    """What each sampler answers greedily to some prompts with the version at which the run then ends."""
    trainer = json.loads(run.folder.plan(1).read_text())["nodes"][0]["name"]
    preprocessor = children_of(run.agent(trainer).pid, run.folder)["preprocess 0"]
    preprocessor.suspend()

    def last() -> int:
        return events(run, "step")[-1].step

    def idle() -> bool:
        before = last()
        time.sleep(5.0)
        return before == last() == events(run, "weights")[-1].step

    lab_cluster.wait_until(idle, START_S, lambda: run.logs(1))
    answers = [[ask(sampler, prompt) for prompt in PROMPTS] for sampler in both]
    run.folder.stop.touch()
    lab_cluster.wait_until(run.folder.export.exists, 60, lambda: run.logs(1))
    preprocessor.resume()
    return answers


def ask(sampler: Sampler, prompt: list[int]) -> dict:
    body = {"token_ids": prompt, "sampling_params": {"n": 1, "temperature": 0.0, "max_tokens": 8, "ignore_eos": True}}
    (answer,) = sampler.post("/prl/generate", body)["answers"]
    return answer


def check_answers(run: LabRun, answers: list[list[dict]]) -> None:
    """They are what Hugging Face makes of the weights that the trainer has exported at the run's end."""
    last = events(run, "weights")[-1].labels
    weights = load_file(run.folder.export / "model.safetensors")
    assert last["digest"] == str(digest(weights))
    model = AutoModelForCausalLM.from_pretrained(run.folder.export)
    for answer, prompt in ((answer, prompt) for own in answers for answer, prompt in zip(own, PROMPTS, strict=True)):
        assert answer["versions"] == [[last["version"], 0, 8]]
        tokens = answer["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        expected = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(answer["logprobs"]).reshape(-1), expected, atol=1e-4, rtol=0)


def check_records(run: LabRun, back: list[tuple[int, float]]) -> None:
    """`back`: who came back, and when."""
    result = audit(run.folder.path)
    assert result.passed, render(result)
    steps, commits = events(run, "step"), events(run, "weights")
    assert [event.step for event in steps] == list(range(1, len(steps) + 1))
    rewards = [event.values["data/reward_mean"] for event in steps]
    assert statistics.mean(rewards[-5:]) > 2 * statistics.mean(rewards[:5])
    assert [event.step for event in commits] == sorted(event.step for event in commits)
    digests = {(event.labels["version"], event.labels["digest"]) for event in commits}
    assert len({version for version, _ in digests}) == len(digests)  # a version that was sent again is the same
    for victim, since in back:
        served = served_after(run.folder, victim, since)
        assert min(served) >= max(event.step for event in commits if event.time <= since)
        assert max(served) > min(served)
