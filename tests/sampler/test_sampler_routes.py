"""What a sampler answers, and whom: its routes before and after the first version. Each test leaves it open."""

import itertools
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
from answers import LONG, PROMPT, logprobs
from launch import HOST
from tiny_models import EOS, weights_of

from prl.metrics.events import Event, read_events


def test_it_joined_with_its_address_and_workers(lab):
    assert lab.joined == {"url": lab.url, "workers": 1}
    assert lab.url.startswith(f"http://{HOST}:")


def test_sockets_between_its_processes_are_the_users_alone(lab):
    process = psutil.Process(lab.process.pid)
    ends = [end for one in (process, *process.children(recursive=True)) for end in one.net_connections(kind="unix")]
    paths = {Path(str(end.laddr)) for end in ends if str(end.laddr).startswith("/")}
    assert {path.parent.parent for path in paths} == {lab.sockets}
    assert {path.parent.stat().st_mode & 0o777 for path in paths} == {0o700}
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_nothing_is_generated_before_the_first_version(lab):
    generate, state, health, own = lab.before
    assert (own.status, own.body) == (503, generate.body)
    assert generate.status == 503
    assert generate.headers["Retry-After"] == "1"
    assert generate.body == {"error": "this sampler has no weights yet: the first version was not committed"}
    assert state.body == {"version": None, "closed": generate.body["error"]}
    assert health.status == 200


def test_every_route_refuses_without_the_token(lab):
    routes = [
        (path, method) for path, methods in lab.request("GET", "/prl/routes").body["routes"] for method in methods or ["GET"]
    ]
    paths = {path for path, _ in routes}
    assert {"/health", "/inference/v1/generate", "/collective_rpc", "/prl/weights/commit", "/docs", "/metrics"} <= paths
    assert ("/prl/generate", "POST") in routes
    routes += [
        ("/prl/generate", "GET"),
        ("/no/such/path", "GET"),
        ("/", "OPTIONS"),
        ("//health", "GET"),
        ("/inference/v1/generate", "OPTIONS"),
    ]
    for (path, method), token in itertools.product(routes, ("", "wrong", lab.token + "x", lab.token[:-1])):
        reply = lab.request(method, path.replace("{", "").replace("}", ""), token=token)
        assert reply.status == 401, (method, path)
    answer = lab.request("GET", "/health", token="")
    assert answer.body == {"error": "this run's token is missing or wrong"}
    assert lab.request("GET", "/health").status == 200


def test_a_websocket_refuses_without_the_token(lab):
    async def shake_hands() -> int:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.ws_connect(lab.url + "/v1/realtime"):
                    return 101
            except aiohttp.WSServerHandshakeError as error:
                return error.status

    assert lab.run(shake_hands()).result(30) == 403


def test_answers_carry_ids_logprobs_and_versions(lab, models):
    lab.update(weights_of(models[0]))
    body = lab.generate(PROMPT, n=16, temperature=1.0, top_p=1.0, max_tokens=5, flat_logprobs=True).result(60).body
    assert [choice["index"] for choice in body["choices"]] == list(range(16))
    for choice in body["choices"]:
        ids = choice["token_ids"]
        assert choice["finish_reason"] == ("stop" if ids[-1] == EOS else "length")
        assert choice["weight_versions"] == [{"version": f"0:{lab.step}", "start": 0, "end": len(ids)}]
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == ids
        assert [entry["logprob"] for entry in content] == pytest.approx(logprobs(models[0], PROMPT, ids), abs=1e-4)


def test_the_route_of_the_actors_answers_as_vllms_does(lab, models):
    lab.update(weights_of(models[0]))
    for prompt in (PROMPT, [7, 7, 10], [1] * 200):
        mine = lab.ask(prompt, max_tokens=40, stop_token_ids=[5]).result(60)
        theirs = lab.generate(prompt, max_tokens=40, stop_token_ids=[5]).result(60)
        assert (mine.status, mine.headers["Content-Type"]) == (200, "application/json")
        (answer,), (choice,) = mine.body["answers"], theirs.body["choices"]
        assert answer["token_ids"] == choice["token_ids"]
        assert answer["logprobs"] == [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert answer["finish_reason"] == choice["finish_reason"]
        assert [dict(zip(("version", "start", "end"), span, strict=True)) for span in answer["versions"]] == choice[
            "weight_versions"
        ]
    answers = lab.ask(PROMPT, n=16, temperature=1.0, max_tokens=5).result(60).body["answers"]
    assert len({tuple(answer["token_ids"]) for answer in answers}) > 8
    for answer in answers:
        assert set(answer) == {"token_ids", "logprobs", "versions", "finish_reason"}
        assert answer["finish_reason"] == ("stop" if answer["token_ids"][-1] == EOS else "length")
        assert answer["logprobs"] == pytest.approx(logprobs(models[0], PROMPT, answer["token_ids"]), abs=1e-4)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "missing required field `token_ids`"),
        ([], "Expected `object`"),
        ({"token_ids": ["1"], "sampling_params": {}}, "Expected `int`"),
        ({"token_ids": [1], "sampling_params": []}, "Expected `object`"),
        ({"token_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "n must be"),
        ({"token_ids": [], "sampling_params": {}}, "cannot be empty"),
        ({"token_ids": [1] * 1024, "sampling_params": {}}, "maximum model length"),
        ({"token_ids": [99], "sampling_params": {}}, "99"),
    ],
)
def test_what_the_route_of_the_actors_cannot_answer_is_refused_with_words(lab, models, body, words):
    lab.update(weights_of(models[0]))
    reply = lab.request("POST", "/prl/generate", body)
    assert (reply.status, set(reply.body)) == (400, {"error"})
    assert words in reply.body["error"]
    assert lab.request("GET", "/prl/generate").status == 405


def test_a_client_that_goes_away_aborts_its_request(lab, models):
    lab.update(weights_of(models[0]))
    with pytest.raises(TimeoutError):
        lab.ask(PROMPT, n=8, temperature=1.0, max_tokens=LONG, ignore_eos=True, timeout_s=0.3).result(60)
    began = time.monotonic()
    body = lab.update(weights_of(models[1])).body
    assert body["gap_s"] == body["pause_s"]  # nothing was in flight
    assert time.monotonic() - began < 1  # nor was it at its end: 8 * 900 tokens take longer


def test_a_fenced_sampler_hands_back_what_it_has_and_serves_nothing_until_the_next_commit(lab, models):
    lab.update(weights_of(models[0]))
    asked = lab.ask(PROMPT, max_tokens=LONG, ignore_eos=True)
    time.sleep(0.2)
    assert lab.request("POST", "/prl/weights/fence", {"reason": "it held other weights"}).status == 200
    (answer,) = asked.result(30).body["answers"]
    assert (answer["finish_reason"], len(answer["token_ids"]) < LONG) == ("abort", True)
    refused = lab.ask(PROMPT, max_tokens=3).result(30)
    assert (refused.status, refused.body) == (503, {"error": "it held other weights"})
    lab.update(weights_of(models[1]))
    assert lab.ask(PROMPT, max_tokens=3).result(30).status == 200


def test_what_the_engine_counts_is_in_the_samplers_metrics(lab, models):
    """The cache keeps whole blocks of 128 tokens: of a prompt of 300 that comes again, 256 are found."""

    def counted(after_s: float) -> list[Event]:
        return [event for event in read_events(lab.folder.metrics / "sampler-0.jsonl")[0] if event.time > after_s]

    def next_line() -> Event:
        asked_s, end = time.time(), time.monotonic() + 20
        while not (found := counted(asked_s)):
            assert time.monotonic() < end, "no line within 20 s"
            time.sleep(0.05)
        assert (found[0].role, found[0].kind, found[0].attempt) == ("sampler", "engine", 1)
        return found[0]

    lab.update(weights_of(models[0]))
    assert lab.ask([1, 10], max_tokens=2).result(60).status == 200
    before = next_line()
    assert [before.values[f"engine/{name}"] for name in ("running", "waiting", "kv_cache_share")] == [0, 0, 0]
    prompt = [number % 10 + 1 for number in range(300)]
    assert lab.ask(prompt, n=3, temperature=1.0, max_tokens=7, ignore_eos=True).result(60).status == 200
    after = next_line()
    assert after.values["engine/generated_tokens"] - before.values["engine/generated_tokens"] == 3 * 7
    assert after.values["engine/prompt_tokens"] - before.values["engine/prompt_tokens"] == 3 * 300
    assert after.values["engine/preemptions"] == before.values["engine/preemptions"]
    assert lab.ask(prompt, max_tokens=1).result(60).status == 200
    next_line()
    shares = [event.values.get("engine/prefix_hit_share") for event in counted(after.time)]
    assert [share for share in shares if share is not None] == [pytest.approx(256 / 300)]
    stream = lab.stream(PROMPT, max_tokens=LONG)
    while_asked = next_line()
    assert while_asked.values["engine/running"] == 1
    assert 0 < while_asked.values["engine/kv_cache_share"] < 1
    assert len(stream.times) > 1
