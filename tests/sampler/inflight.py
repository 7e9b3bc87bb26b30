"""Answers of a real sampler whose weights change under them, against what Hugging Face says over the same versions."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lab import Lab, Reply
from lane_trainer import lane_trainer
from tiny_models import EOS, Weights, one_word_model, tiny_model, weights_of
from transformers import DynamicCache, Qwen2ForCausalLM

from prl.weights.digest import digest

Models = Mapping[str, Qwen2ForCausalLM]  # by the labels of the versions
Send = Callable[[Weights], Any]  # have the next version staged in every worker
SURE = 1e-4  # logits that are closer may come in another order: float32 sums depend on theirs
SAME = [(7 * k + k // 9) % 10 for k in range(300)]  # asked of each version: two full blocks of the cache and a rest
FRESH, SHORT, LONG = 24, 150, 600  # tokens


@dataclass(frozen=True)
class Told:
    """An answer to a prompt: tokens [start, end) of it are said to be of the version of that label."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[str, int, int]]

    @property
    def labels(self) -> list[str]:
        return [label for label, _, _ in self.versions]


def logits_of(models: Models, told: Told, *, recompute: bool) -> torch.Tensor:
    """Hugging Face's, [tokens, vocabulary], before each token: of each span by its own weights, over the cache that the
    earlier ones have left, or with `recompute` over one that these weights have computed of all before."""
    ids = torch.tensor([told.prompt + told.token_ids])
    cache, fed, logits = DynamicCache(), 0, []
    for label, start, end in told.versions:
        if recompute:
            cache, fed = DynamicCache(), 0
        until = len(told.prompt) + end - 1
        with torch.no_grad():
            output = models[label](input_ids=ids[:, fed:until], past_key_values=cache, use_cache=True)
        logits.append(output.logits[0, start - end :])
        fed = until
    return torch.cat(logits)


@dataclass(frozen=True)
class Fit:
    """How an answer compares with the greedy one."""

    tokens: int
    ties: int  # tokens that are not Hugging Face's choice
    off: float  # the most that a token's logit lies below the best one's, or its log-prob beside Hugging Face's


def fit(models: Models, told: Told, *, recompute: bool) -> Fit:
    logits, ids = logits_of(models, told, recompute=recompute), torch.tensor(told.token_ids)[:, None]
    best, choices = logits.max(-1)
    behind = best - logits.gather(1, ids)[:, 0]
    beside = (logits.log_softmax(-1).gather(1, ids)[:, 0] - torch.tensor(told.logprobs)).abs()
    return Fit(len(ids), int((choices != ids[:, 0]).sum()), float(torch.maximum(behind, beside).max()))


def told_of(prompt: list[int], reply: Reply) -> Told:
    """Of the actors' route."""
    assert reply.status == 200, reply
    (answer,) = reply.body["answers"]
    spans = [(label, start, end) for label, start, end in answer["versions"]]
    assert [start for _, start, _ in spans] + [len(answer["token_ids"])] == [0, *(end for _, _, end in spans)]
    return Told(prompt, answer["token_ids"], answer["logprobs"], spans)


def follow(lab: Lab, send: Send, models: Sequence[Qwen2ForCausalLM], seed: int, *, clear_cache: bool) -> None:
    """Bring one model after the other. What is in flight goes on over the old cache, or with `clear_cache` over a new one;
    what is asked behind a commit is of the new weights alone. Every token and log-prob is Hugging Face's."""
    rng = random.Random(seed)
    labels: dict[str, Qwen2ForCausalLM] = {}
    fits: list[Fit] = []
    asked: list[tuple[list[int], Future[Reply]]] = []

    def ask(tokens: int, question: list[int] | None = None) -> tuple[list[int], Future[Reply]]:
        question = question or [rng.randrange(10) for _ in range(rng.randint(1, 60))]
        return question, lab.ask(question, max_tokens=tokens, ignore_eos=True)

    def keep_busy() -> None:
        running = sum(not reply.done() for _, reply in asked)
        asked.extend(ask(rng.choice([SHORT, SHORT, LONG])) for _ in range(3 - running))

    for model in models:
        if labels:
            keep_busy()
        send(weights_of(model))
        if labels:
            keep_busy()
        reply = lab.commit(digest(weights_of(model)), clear_cache=clear_cache)
        assert reply.status == 200, reply
        label = f"0:{lab.step}"
        labels[label] = model
        for question, answer in [ask(FRESH, SAME), ask(FRESH)]:
            told = told_of(question, answer.result(60))
            assert told.versions == [(label, 0, FRESH)]
            fits.append(fit(labels, told, recompute=True))
    in_flight = [told_of(question, answer.result(60)) for question, answer in asked]
    order, crossed, noticed = list(labels), set(), []
    for told in in_flight:
        first = order.index(told.labels[0])
        assert told.labels == order[first : first + len(told.labels)]
        fits.append(fit(labels, told, recompute=clear_cache))
        if len(told.labels) > 1:
            crossed |= set(itertools.pairwise(told.labels))
            noticed.append(fit(labels, told, recompute=not clear_cache).off > 100 * SURE)
    off, tokens, ties = max(one.off for one in fits), sum(one.tokens for one in fits), sum(one.ties for one in fits)
    print(f"{tokens} tokens, {ties} ties, off by {off:.1e} at most; {len(crossed)} of {len(models) - 1} updates crossed")
    assert off < SURE
    assert ties < 1e-3 * tokens
    assert len(crossed) >= 0.5 * (len(models) - 1)  # on a busy machine some have ended before the commit
    assert sum(noticed) > 0.9 * len(noticed)  # else the test could not tell the one way from the other


@contextmanager
def by_transport(lab: Lab, transport: str) -> Iterator[Send]:
    """How new versions come: whole, as deltas to the one before, or by lanes from two trainer ranks, there too as deltas where
    it is asked for. In a group of its own, and each is committed."""
    if transport in ("lanes", "deltas by lanes"):
        with lane_trainer(lab) as trainer:
            sent = itertools.count()
            yield lambda weights: trainer.send(weights, held=next(sent) > 0 and transport != "lanes")
        lab.connect()  # for whole ones again
        return
    lab.connect()
    held: int | None = None

    def send(weights: Weights) -> None:
        nonlocal held
        report, _ = lab.send(weights, held if transport == "deltas" else None)
        assert (report.changed_share is not None) == (transport == "deltas" and held is not None)
        held = digest(weights)
        assert report.digest == held

    yield send


def one_word_models(count: int, **like: Any) -> list[tuple[int, Qwen2ForCausalLM]]:
    """Versions that can be told by what they say, each with its word. Where there are more versions than words, these come
    again after all others."""
    words = [word for word in range(like.get("vocabulary", 16)) if word != EOS]
    made = []
    for seed, word in zip(range(count), itertools.cycle(words)):
        model = one_word_model(word, seed, **like)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[word, *range(10)]])).logits[0]
        others = logits.index_fill(1, torch.tensor([word]), -torch.inf).amax(-1)
        assert (logits[:, word] - others).min() > 50  # sampled at a temperature of 1, nothing else comes
        made.append((word, model))
    return made


def drifting_models(count: int, **like: Any) -> list[Qwen2ForCausalLM]:
    """Each differs from the one before in every fiftieth value."""
    made = []
    for number in range(count):
        model = tiny_model(0, **like)
        if made:
            model.load_state_dict(nudged(made[-1].state_dict(), number))
        made.append(model)
    return made


def nudged(weights: Weights, seed: int) -> Weights:
    """Every fiftieth value is another."""
    result = {}
    for name, tensor in weights.items():
        flat = tensor.detach().clone().reshape(-1)
        flat[seed::50] *= 1.25
        result[name] = flat.reshape(tensor.shape)
    return result


@dataclass(frozen=True)
class Heard:
    """Answers that came between two times of the updates."""

    since: int  # number of the version that was committed when they were asked for
    until: int  # of the one that was on its way when they were there
    answers: list[tuple[list[int], list[tuple[str, int, int]]]]


def hear(lab: Lab, send: Send, versions: Sequence[tuple[int, Qwen2ForCausalLM]], seed: int, *, clear_cache: bool) -> None:
    """Bring the versions at random moments while several clients ask for answers of random lengths, by the actors' route and
    by vLLM's. Every token is the word of the version that it is said to be of, and no version is older than what was
    committed before the request, or newer than what was sent when the answer came."""
    committed = begun = 0
    over = threading.Event()
    numbers: dict[str, int] = {}  # of the versions, by their labels
    words = [word for word, _ in versions]

    def client(number: int) -> list[Heard]:
        rng, heard = random.Random(1000 * seed + number), []
        while not over.is_set():
            since, prompt = committed, [rng.randrange(10) for _ in range(rng.randint(1, 40))]
            sampling = {"n": rng.randint(1, 3), "max_tokens": rng.randint(1, 150), "temperature": 1.0, "ignore_eos": True}
            reply = (lab.ask if number % 2 else lab.generate)(prompt, **sampling).result(60)
            assert reply.status == 200, reply
            heard.append(Heard(since, begun, _answers(reply)))
        return heard

    def commit(number: int) -> None:
        nonlocal begun, committed
        numbers[f"0:{lab.step}"] = begun = number
        reply = lab.commit(digest(weights_of(versions[number][1])), clear_cache=clear_cache)
        assert reply.status == 200, reply
        committed = number

    send(weights_of(versions[0][1]))
    commit(0)
    rng = random.Random(seed)
    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, number) for number in range(6)]
        try:
            for number, (_, model) in enumerate(versions[1:], 1):
                over.wait(rng.uniform(0, 0.1))
                send(weights_of(model))
                over.wait(rng.uniform(0, 0.1))
                commit(number)
        finally:
            over.set()
        heard = [one for future in clients for one in future.result()]
    seen, spanning = set(), 0
    for one in heard:
        for ids, spans in one.answers:
            met = [numbers[label] for label, _, _ in spans]
            assert met == sorted(set(met))
            assert one.since <= met[0] <= met[-1] <= one.until
            assert [start for _, start, _ in spans] + [len(ids)] == [0, *(end for _, _, end in spans)]
            assert ids == [words[numbers[label]] for label, start, end in spans for _ in range(start, end)]
            seen |= set(met)
            spanning += len(met) > 1
    assert len(seen) > 0.9 * len(versions)
    assert spanning >= len(versions)


def _answers(reply: Reply) -> list[tuple[list[int], list[tuple[str, int, int]]]]:
    if "answers" in reply.body:
        return [(one["token_ids"], [tuple(span) for span in one["versions"]]) for one in reply.body["answers"]]
    return [
        (one["token_ids"], [(span["version"], span["start"], span["end"]) for span in one["weight_versions"]])
        for one in reply.body["choices"]
    ]
