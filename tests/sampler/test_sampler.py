"""What a real sampler does, from its first version to its last; each test leaves it open."""

import contextlib
import itertools
import json
import os
import statistics
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from inflight import nudged
from lab import EOS, HOST, Lab, Weights, tiny_model, weights_of
from lane_trainer import lane_trainer, meet, route_to
from transformers import DynamicCache, Qwen2ForCausalLM

from prl.runfolder.weights import folder_of
from prl.weights.delta import HEADER_BYTES
from prl.weights.digest import digest
from prl.weights.group import TransportError
from prl.weights.legs import changed_share
from prl.weights.plan import TensorSpec, schedule, to_json
from prl.weights.transport import spec_of

PROMPT = [3, 1, 9, 4, 10]
LONG = 900


@pytest.fixture(scope="module")
def models() -> list[Qwen2ForCausalLM]:
    return [tiny_model(seed) for seed in range(6)]


def greedy(models: dict[str, Qwen2ForCausalLM], choice: dict, prompt: list[int], *, recompute: bool = False) -> list[int]:
    """What Hugging Face would say next at every token of an answer: each span by its own weights, over the cache that the
    earlier ones left, or with `recompute` over one computed anew. It equals the answer where the answer is greedy."""
    ids = prompt + choice["token_ids"]
    cache, done, out = DynamicCache(), 0, []
    for span in choice["weight_versions"]:
        if recompute:
            cache, done = DynamicCache(), 0
        until = len(prompt) + span["end"] - 1  # what is fed before the span's last token is sampled
        with torch.no_grad():
            output = models[span["version"]](input_ids=torch.tensor([ids[done:until]]), past_key_values=cache, use_cache=True)
        out += output.logits[0, span["start"] - span["end"] :].argmax(-1).tolist()
        done = until
    return out


def logprobs(model: Qwen2ForCausalLM, prompt: list[int], ids: list[int]) -> list[float]:
    """What Hugging Face says of the tokens of an answer."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def greedy_answer(model: Qwen2ForCausalLM, prompt: list[int], tokens: int) -> list[int]:
    """Hugging Face's own, token by token."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def during_updates(
    lab: Lab, models: list[Qwen2ForCausalLM], prompt: list[int], *, clear_cache: bool = False, ask=None, **sampling
):
    """A reply in flight over three updates, or as many as begin before it ends, and the models by their labels."""
    labels = {f"0:{lab.step}": models[0]}
    reply = (ask or lab.generate)(prompt, max_tokens=LONG, ignore_eos=True, **sampling)
    for model in models[1:4]:
        if reply.done():
            break
        lab.update(weights_of(model), clear_cache=clear_cache)
        labels[f"0:{lab.step}"] = model
    return reply.result(60).body, labels


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


def test_an_update_changes_the_greedy_answer_of_the_same_process(lab, models):
    answers, processes = [], []
    for model in models[:2]:
        lab.update(weights_of(model))
        (answer,) = lab.ask(PROMPT, max_tokens=60, ignore_eos=True).result(60).body["answers"]
        assert answer["token_ids"] == greedy_answer(model, PROMPT, 60)
        assert answer["versions"] == [[f"0:{lab.step}", 0, 60]]
        answers.append(answer["token_ids"])
        processes.append([lab.process.pid, *(one.pid for one in psutil.Process(lab.process.pid).children(recursive=True))])
    assert answers[0] != answers[1]
    assert processes[0] == processes[1]


def test_a_prompt_that_was_asked_before_an_update_reuses_nothing_of_it(lab, models):
    """A prompt of two full blocks of the cache (128 tokens each on CPUs) and a rest."""
    prompt = [(7 * k + k // 9) % 10 for k in range(300)]
    differ = []
    for model in models[:3]:
        lab.update(weights_of(model))
        cached = []
        for _ in range(2):
            body = lab.generate(prompt, max_tokens=8, ignore_eos=True).result(60).body
            cached.append((body["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))
            (answer,) = lab.ask(prompt, max_tokens=8, ignore_eos=True).result(60).body["answers"]
            (choice,) = body["choices"]
            assert answer["token_ids"] == choice["token_ids"] == greedy_answer(model, prompt, 8)
            assert answer["logprobs"] == pytest.approx(logprobs(model, prompt, answer["token_ids"]), abs=1e-4)
        assert cached == [0, 256]  # within a version it is shared
        differ.append(answer["logprobs"])
    assert differ[0] != pytest.approx(differ[1], abs=1e-2)  # else the test could not tell
    shared = lab.generate(prompt[::-1], n=8, temperature=1.0, max_tokens=2).result(60).body
    assert shared["usage"]["prompt_tokens_details"]["cached_tokens"] == 256  # and by the answers to one request


def test_an_answer_in_flight_goes_on_with_new_weights_over_the_old_cache(lab, models):
    lab.update(weights_of(models[0]))
    body, labels = during_updates(lab, models, PROMPT)
    (choice,) = body["choices"]
    spans = choice["weight_versions"]
    first = list(labels).index(spans[0]["version"])
    assert [span["version"] for span in spans] == list(labels)[first : first + len(spans)]
    assert len(spans) >= 3
    assert (spans[0]["start"], spans[-1]["end"]) == (0, LONG)
    assert choice["token_ids"] == greedy(labels, choice, PROMPT)
    assert choice["token_ids"] != greedy(labels, choice, PROMPT, recompute=True)  # else the test could not tell


def test_with_clear_cache_the_answer_goes_on_over_a_new_cache(lab, models):
    lab.update(weights_of(models[0]))
    body, labels = during_updates(lab, models, PROMPT, clear_cache=True)
    (choice,) = body["choices"]
    assert len(choice["weight_versions"]) >= 3
    assert choice["token_ids"] == greedy(labels, choice, PROMPT, recompute=True)


def test_many_answers_in_flight_span_versions(lab, models):
    lab.update(weights_of(models[0]))
    body, labels = during_updates(lab, models, PROMPT, ask=lab.ask, n=8, temperature=1.0)
    assert len(body["answers"]) == 8
    for answer in body["answers"]:
        versions, starts, ends = zip(*answer["versions"], strict=True)
        assert len(set(versions)) >= 2
        assert set(versions) <= set(labels)
        assert starts == (0, *ends[:-1])
        assert ends[-1] == len(answer["token_ids"]) == len(answer["logprobs"]) == LONG


def test_the_measured_gap_of_an_update_is_what_a_client_sees(lab, models):
    """The largest gap between two tokens of a stream around each of several updates, as its client sees it and as the sampler
    measures it; the median counts, as others use this machine's cores too."""
    lab.update(weights_of(models[0]))
    pauses, gaps, seen = [], [], []
    while len(seen) < 8:
        stream = lab.stream(PROMPT, max_tokens=LONG)
        windows = []
        for model in models[1:5]:
            report, _ = lab.send(weights_of(model))
            began = time.perf_counter()
            body = lab.commit(report.digest).body
            windows.append((began, time.perf_counter(), body))
        times = stream.times
        for began, ended, body in windows:
            if times[-1] > ended:  # the stream was in flight for all of it
                seen.append(max(b - a for a, b in itertools.pairwise(times) if b > began and a < ended))
                pauses.append(body["pause_s"])
                gaps.append(body["gap_s"])
    ms = {
        name: {"median": round(1e3 * statistics.median(values), 1), "largest": round(1e3 * max(values), 1)}
        for name, values in (("pause", pauses), ("gap", gaps), ("gap seen", seen))
    }
    print(json.dumps({"updates": len(seen), "ms": ms}))
    assert min(*gaps, *pauses) > 0
    assert abs(statistics.median(seen) - statistics.median(gaps)) < 0.1 * statistics.median(gaps) + 0.01


def test_without_anything_in_flight_the_gap_is_the_pause(lab, models):
    lab.update(weights_of(models[0]))
    assert lab.ask(PROMPT, max_tokens=3).result(30).status == 200
    body = lab.update(weights_of(models[1])).body
    assert body["gap_s"] == body["pause_s"] > 0


def test_two_swapped_tensors_are_refused(lab, models):
    good = weights_of(models[1])
    lab.update(good)
    first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    swapped: Weights = good | {first: good[second], second: good[first]}
    _, staged = lab.send(swapped)
    assert int(staged["digest"]) != digest(good)
    refused = lab.commit(digest(good))
    assert refused.status == 409
    assert "arrived in worker 0 with digest" in refused.body["error"]
    closed = lab.generate(PROMPT, max_tokens=3).result(30)
    assert (closed.status, closed.body) == (503, refused.body)
    lab.update(good)
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 200


def test_a_live_parameter_that_changes_after_the_copy_is_caught(lab, models):
    lab.update(weights_of(models[0]))
    assert lab.request("POST", "/collective_rpc", {"method": "corrupt_next_commit"}).status == 200
    report, staged = lab.send(weights_of(models[1]))
    assert staged["digest"] == str(report.digest)  # it arrived well
    in_flight = lab.stream(PROMPT, max_tokens=LONG)
    refused = lab.commit(report.digest)
    assert refused.status == 409
    assert "the live copy differs from what was received" in refused.body["error"]
    assert in_flight.last["finish_reason"] == "abort"
    assert {span["version"] for span in in_flight.last["weight_versions"]} == {f"0:{lab.step - 1}"}  # no token of the new one
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 503
    assert lab.request("GET", "/prl/state").body["closed"] == refused.body["error"]
    lab.update(weights_of(models[1]))
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 200


def test_a_version_that_was_not_received_cannot_be_committed(lab, models):
    lab.update(weights_of(models[0]))
    lab.step += 1
    refused = lab.commit(1)
    assert (refused.status, refused.body) == (409, {"error": f"worker 0 holds no staged version, not 0:{lab.step}"})
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 200  # the old one serves on


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(lab, models):
    good = weights_of(models[0])
    lab.update(good)
    some = next(iter(good))
    cases = {
        "model.layers.7.mlp.up_proj.weight is no parameter of Qwen2ForCausalLM": good
        | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2)},
        f"{some} is bfloat16, the sampler holds torch.float32": good | {some: good[some].bfloat16()},
        f"{some} has shape (16, 32), the sampler needs (16, 64)": good | {some: good[some][:, :32]},
        "no tensor fills these parameters of the sampler: model.layers.0.mlp.down_proj.weight": {
            name: tensor for name, tensor in good.items() if name != "model.layers.0.mlp.down_proj.weight"
        },
    }
    for words, weights in cases.items():
        reply = lab.offer(weights)
        assert reply.status == 400
        assert words in reply.body["error"]
        tensors = to_json(spec_of(name, tensor) for name, tensor in weights.items())
        reply = lab.request("POST", "/prl/weights/connect", lab.meeting(lab.epoch + 1) | {"tensors": tensors})
        assert reply.status == 400
        assert words in reply.body["error"]
    lab.update(good)  # the group of before still stands


def test_a_trainer_with_other_settings_is_refused_before_the_group_is_built(lab, models):
    lab.update(weights_of(models[0]))
    here = os.uname().nodename
    tensors = [TensorSpec("lm_head.weight", "bfloat16", (16, 64))]
    cases = [
        (
            {**os.environ, "NCCL_CUMEM_ENABLE": "0"},
            {},
            "NCCL_CUMEM_ENABLE is 0 at the trainer on node7 and not set at sampler 0",
        ),
        ({**os.environ, "GLOO_DEVICE_TRANSPORT": "TCP_TLS"}, {}, "GLOO_DEVICE_TRANSPORT is TCP_TLS at the trainer on node7"),
        (
            os.environ,
            {"dtype": "bfloat16"},
            f"dtype is bfloat16 at the trainer on node7 and float32 at sampler 0, worker 0, on {here}",
        ),
        (os.environ, {"bucket_bytes": 2**28}, "bucket_bytes is 268435456 at the trainer on node7 and 1048576 at sampler 0"),
        (os.environ, {"tensors": tensors}, "tensors is 1 of 2048 bytes"),
        (os.environ, {"libraries": {"torch": "1.13.0", "library": "gloo"}}, "torch is 1.13.0 at the trainer on node7"),
    ]
    for environment, others, words in cases:
        facts = lab.facts(environment, **others)
        reply = lab.request("POST", "/prl/weights/connect", lab.meeting(lab.epoch + 1) | {"facts": facts})
        assert reply.status == 400
        assert words in reply.body["error"]
        assert "\n" not in reply.body["error"]
    lab.update(weights_of(models[1]))  # the group of before still stands
    facts = lab.facts({**os.environ, "GLOO_SOCKET_IFNAME": "ib7"})
    lab.epoch += 1
    assert lab.request("POST", "/prl/weights/connect", lab.meeting(lab.epoch) | {"facts": facts}).status == 200
    lab.trainer.join(lab.epoch, 2)
    lab.update(weights_of(models[0]))
    assert "differences from the trainer that do no harm: GLOO_SOCKET_IFNAME is ib7" in lab.log.read_text()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("connect", {}, "master_address is missing"),
        ("receive", {"lineage": "0"}, "lineage must be int, not '0'"),
        ("commit", [], "expected a JSON object with lineage, step, digest, clear_cache"),
        ("commit", {"lineage": 0, "step": 1, "digest": "x", "clear_cache": False}, "digest"),
    ],
)
def test_wrong_bodies_are_refused(lab, path, body, words):
    reply = lab.request("POST", f"/prl/weights/{path}", body)
    assert reply.status == 400
    assert words in reply.body["error"]


def test_a_transfer_that_breaks_off_is_reported_and_a_new_epoch_mends_it(lab, models):
    lab.update(weights_of(models[0]))
    assert lab.offer(weights_of(models[1])).status == 200
    lab.trainer.close()
    report = lab.staged.get(timeout=30)
    assert report["step"] == lab.step
    assert "bucket 1 of 1 from the trainer" in report["error"]
    assert (report["missing"], report["halt"]["reached"], report["halt"]["overdue"]) == ([], 1, False)
    assert lab.offer(weights_of(models[1])).status == 200  # and without a new epoch
    assert "no group for version" in lab.staged.get(timeout=30)["error"]
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 200
    lab.connect()
    lab.update(weights_of(models[1]))


def test_versions_that_come_as_deltas_are_what_the_trainer_has(lab, models):
    """One after the other, each verified by the digest of the live parameters; also where the one before was not committed."""
    weights = weights_of(models[0])
    lab.update(weights)
    whole, held = sum(4 * tensor.numel() for tensor in weights.values()), digest(weights)
    for seed, commits in ((1, True), (2, False), (3, True), (3, True)):
        weights = nudged(weights, seed)
        report, staged = lab.send(weights, held)
        held = digest(weights)
        assert staged["digest"] == str(report.digest) == str(held)
        assert report.bytes < 0.05 * whole
        assert 0.01 < report.changed_share < 0.03
        if commits:
            assert lab.commit(held).status == 200
    lab.take(lab.store(weights), weights)  # a seed leaves what the group has brought
    report, _ = lab.send(nudged(weights, 4), held)
    assert 0.01 < report.changed_share < 0.03
    assert lab.commit(report.digest).status == 200
    reply = lab.generate(PROMPT, max_tokens=3).result(30)
    assert reply.body["choices"][0]["weight_versions"][0]["version"] == f"0:{lab.step}"


def test_a_delta_to_what_a_worker_does_not_hold_is_refused_and_a_new_epoch_mends_it(lab, models):
    weights = weights_of(models[0])
    lab.update(weights)
    assert lab.request("POST", "/collective_rpc", {"method": "forget_version"}).status == 200
    assert lab.offer(weights).status == 200
    with contextlib.suppress(TransportError):  # it may be on its way before the sampler leaves
        lab.trainer.send(nudged(weights, 1), digest(weights))
    report = lab.staged.get(timeout=30)
    assert report["step"] == lab.step
    assert f"a delta to the weights with digest {digest(weights)}, but nothing to apply it to is held" in report["error"]
    lab.connect()
    lab.update(nudged(weights, 1))


def test_versions_that_come_by_lanes_serve_as_those_that_come_whole(lab, models):
    lab.update(weights_of(models[1]))
    (whole,) = lab.ask(PROMPT, max_tokens=60, ignore_eos=True).result(60).body["answers"]
    with lane_trainer(lab) as trainer:
        labels = {}
        for model in models[:2]:
            reports = trainer.update(weights_of(model))
            labels[f"0:{lab.step}"] = model
        headers = HEADER_BYTES * len(schedule(trainer.route.plan, trainer.route.bucket_bytes))
        assert sum(report.bytes for report in reports) <= headers + sum(spec.bytes for spec in trainer.route.plan.tensors)
        assert all(report.bytes for report in reports)  # each root sends
        (answer,) = lab.ask(PROMPT, max_tokens=60, ignore_eos=True).result(60).body["answers"]
        assert answer["token_ids"] == whole["token_ids"]
        assert answer["versions"] == [[f"0:{lab.step}", 0, 60]]
        stream = lab.stream(PROMPT, max_tokens=LONG, temperature=0.0)
        trainer.update(weights_of(models[2]))
        labels[f"0:{lab.step}"] = models[2]
        assert [span["version"] for span in stream.last["weight_versions"]] == list(labels)[-2:]
    lab.connect()
    lab.update(weights_of(models[1]))  # whole again


def test_versions_that_come_as_deltas_by_lanes_are_what_the_trainer_has(lab, models):
    """To the live version, which the trainer knows to be committed; each verified by the digest of the live parameters."""
    weights = weights_of(models[0])
    with lane_trainer(lab) as trainer:
        whole = sum(report.bytes for report in trainer.update(weights))
        for seed in (1, 2, 3):
            weights = nudged(weights, seed)
            reports = trainer.update(weights)
            assert sum(report.bytes for report in reports) < 0.05 * whole
            assert 0.01 < changed_share(leg for report in reports for leg in report.legs) < 0.03
        trainer.send(nudged(weights, 4), held=True)  # and is not committed
        reports = trainer.update(weights)  # so that all of the next one comes
        assert sum(report.bytes for report in reports) == whole
    lab.connect()


def test_a_delta_by_lanes_to_what_is_not_live_is_refused_and_a_new_epoch_mends_it(lab, models):
    weights = weights_of(models[0])
    with lane_trainer(lab) as trainer:
        trainer.update(weights)
        assert lab.request("POST", "/collective_rpc", {"method": "forget_version"}).status == 200
        report = trainer.refused(nudged(weights, 1))
        assert "but nothing to apply it to is held: a dense version has to come first" in report["error"]
    with lane_trainer(lab) as trainer:
        trainer.update(nudged(weights, 1))
    lab.connect()


def test_lanes_that_do_not_lead_to_this_sampler_are_refused_before_they_are_built(lab, models):
    lab.update(weights_of(models[0]))
    plan, epoch = route_to(lab).plan.digest(), lab.epoch
    for reply, words in (
        (meet(lab, plan, ranks=4), f"plan is {plan} at the trainer"),
        (meet(lab, "another"), f"and {plan} at sampler 0, worker 0,"),
        (meet(lab, plan, ranks="2"), "lanes: expected {trainer_ranks, samplers: [number of a replica...]}"),
        (meet(lab, plan, ranks=-1), "trainer ranks"),
    ):
        assert reply.status == 400, reply
        assert words in reply.body["error"]
    lab.epoch = epoch
    lab.update(weights_of(models[1]))  # the group of before still stands


def test_an_error_that_is_none_of_the_transports_is_reported_too(lab, models):
    """The thread that waits for the trainer lives on and tells of it with the next receive."""
    lab.update(weights_of(models[0]))
    assert lab.request("POST", "/collective_rpc", {"method": "break_group", "args": ["receive"]}).status == 200
    assert lab.offer(weights_of(models[1])).status == 200
    report = lab.staged.get(timeout=30)
    assert (report["step"], report["epoch"]) == (lab.step, lab.epoch)
    assert "KeyError: 'receive is broken'" in report["error"]
    assert lab.ask(PROMPT, max_tokens=3).result(30).status == 200
    lab.trainer.close()
    lab.connect()
    lab.update(weights_of(models[1]))


def test_a_group_that_waits_for_others_or_cannot_be_closed_does_not_hold_up_the_next_one(lab, models):
    lab.update(weights_of(models[0]))
    assert lab.request("POST", "/collective_rpc", {"method": "break_group", "args": ["close"]}).status == 200
    lab.epoch += 1
    assert lab.request("POST", "/prl/weights/connect", lab.meeting(lab.epoch)).status == 200  # the trainer does not come
    assert lab.offer(weights_of(models[1])).status == 200
    began = time.monotonic()
    lab.connect()
    lab.update(weights_of(models[1]))
    assert time.monotonic() - began < 10  # of the 30 s that the other groups would wait
    assert lab.staged.empty()  # nobody is told of what was left


def test_the_live_version_goes_into_files_and_another_state_takes_it_from_there(lab, models):
    lab.update(weights_of(models[0]))
    asked = lab.ask(PROMPT, max_tokens=LONG, ignore_eos=True)
    stored = lab.store(weights_of(models[0]))
    assert stored.digest == digest(weights_of(models[0]))
    assert asked.result(60).status == 200  # meanwhile it serves
    lab.update(weights_of(models[1]))
    in_flight = lab.ask(PROMPT, max_tokens=LONG, ignore_eos=True)
    lab.take(stored, weights_of(models[0]))
    versions = in_flight.result(60).body["answers"][0]["versions"]
    assert [label for label, _, _ in versions] == [f"0:{lab.step}", str(stored.version)]
    (answer,) = lab.ask(PROMPT, max_tokens=60, ignore_eos=True).result(60).body["answers"]
    assert answer["token_ids"] == greedy_answer(models[0], PROMPT, 60)
    refused = lab.request(
        "POST", "/prl/weights/store", {"lineage": 0, "step": lab.step, "seed": 1, "folder": "nowhere", "tensors": []}
    )
    words = f"version 0:{lab.step} cannot be stored: version {stored.version} is live"
    assert (refused.status, refused.body) == (409, {"error": words})


def test_files_that_are_damaged_or_missing_are_named_and_the_live_version_serves_on(lab, models):
    lab.update(weights_of(models[0]))
    stored = lab.store(weights_of(models[0]))
    path = folder_of(lab.folder.weights, stored.version) / stored.files[0].path
    whole = path.read_bytes()
    for damaged, words in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), "is damaged: digest"),
        (whole[:-9], f"has {len(whole) - 9} bytes, of {len(whole)}"),
    ):
        path.write_bytes(damaged)
        (report,) = lab.load(stored, weights_of(models[0]))
        assert f"StoredError: {path}: " in report["error"]
        assert words in report["error"]
        assert (report["seed"], report["step"]) == (2, lab.step)
    path.unlink()
    (report,) = lab.load(stored, weights_of(models[0]))
    assert f"StoredError: {path}: No such file" in report["error"]
    assert lab.ask(PROMPT, max_tokens=3).result(60).status == 200
    lab.update(weights_of(models[1]))  # and the group stands


def test_a_version_that_arrives_takes_the_place_of_one_that_is_read(lab, models):
    """The files never come: the sampler would look for them for 30 s."""
    lab.update(weights_of(models[0]))
    tensors = to_json(spec_of(name, tensor) for name, tensor in weights_of(models[0]).items())
    body = {"lineage": 0, "step": 10**6, "epoch": lab.epoch, "seed": 3, "tensors": tensors}
    assert lab.request("POST", "/prl/weights/load", body).status == 200
    lab.update(weights_of(models[1]))
    assert lab.ask(PROMPT, max_tokens=3).result(60).status == 200
    assert lab.staged.empty()


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
