"""What a new version changes, also in answers that are on their way, and what that costs."""

import itertools
import json
import statistics
import time

import psutil
import pytest
from answers import LONG, PROMPT, during_updates, greedy, greedy_answer, logprobs
from tiny_models import weights_of


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
    measures it. Others use this machine's cores, too, and hold up either of the two: the nearest quarter counts."""
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
    apart = sorted(abs(a - b) for a, b in zip(seen, gaps, strict=True))
    assert apart[len(apart) // 4] < 0.1 * statistics.median(gaps) + 0.01


def test_without_anything_in_flight_the_gap_is_the_pause(lab, models):
    lab.update(weights_of(models[0]))
    assert lab.ask(PROMPT, max_tokens=3).result(30).status == 200
    body = lab.update(weights_of(models[1])).body
    assert body["gap_s"] == body["pause_s"] > 0
