"""A sampler's reply, turned into arrays once."""

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prl.domains.api import SamplerError
from prl.flow.versions import Version
from prl.streams.records import Float32, Int16, Int32, VersionSpan

_ROUNDING = 1e-3  # by so much a log-prob may lie above 0
FINISH_REASONS = ("stop", "length", "abort")
_ROUTING_DTYPES = ("uint8", "uint16", "int32")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a reply: what a Turn is made of."""

    output_ids: Int32  # [output tokens]
    logprobs: Float32  # [output tokens]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    routings: Int16 | None = None  # as of Turn


def parse_reply(reply: Any, n: int, prompt_tokens: int) -> list[Answer | SamplerError]:
    """The n answers of a decoded reply to a prompt of so many tokens, in order. An answer that is missing or
    malformed is an error in its place; SamplerError is raised where the reply as a whole is none."""
    sent = reply.get("answers") if isinstance(reply, Mapping) else None
    if not isinstance(sent, list):
        raise SamplerError("malformed", f"a sampler's reply has no answers: {str(reply)[:200]}")
    if len(sent) > n:
        raise SamplerError("malformed", f"a sampler's reply has {len(sent)} answers where {n} were asked for")
    answers: list[Answer | SamplerError] = []
    for answer in sent:
        try:
            answers.append(parse_answer(answer, prompt_tokens))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            words = f"malformed answer in a sampler's reply: {error!r}: {str(answer)[:200]}"
            answers.append(SamplerError("malformed", words))
    for k in range(len(sent), n):
        words = f"a sampler's reply has {len(sent)} answers; answer {k} of {n} is missing"
        answers.append(SamplerError("malformed", words))
    return answers


def parse_answer(answer: Mapping[str, Any], prompt_tokens: int) -> Answer:
    """Raises KeyError, TypeError, ValueError or OverflowError where it is malformed."""
    finish_reason = answer["finish_reason"]
    if finish_reason not in FINISH_REASONS:
        raise ValueError(f"finish reason {finish_reason!r}")
    output_ids = np.array(answer["token_ids"], dtype=np.int32)
    length = len(output_ids)
    if length == 0:
        if finish_reason != "abort":
            raise ValueError("an answer without tokens")
        return Answer(output_ids, np.empty(0, np.float32), (), finish_reason)
    logprobs = np.array(answer["logprobs"], dtype=np.float32)
    if logprobs.shape != (length,):
        raise ValueError(f"{length} tokens with log-probs of shape {logprobs.shape}")
    if not (-np.inf < logprobs.min() <= logprobs.max() <= _ROUNDING):  # also where one is NaN, null on the wire
        raise ValueError("a sampled token without a log-prob, or with one above 0")
    routings = parse_routings(answer["routings"], prompt_tokens + length - 1) if "routings" in answer else None
    return Answer(output_ids, logprobs, parse_versions(answer["versions"], length), finish_reason, routings)


def parse_routings(sent: Sequence[Any], tokens: int) -> Int16:
    """The experts of so many tokens. Raises TypeError or ValueError."""
    *shape, kind, text = sent
    if kind not in _ROUTING_DTYPES or len(shape) != 3 or shape[0] != tokens:
        raise ValueError(f"routings of {shape} as {kind} for {tokens} tokens")
    found = np.frombuffer(binascii.a2b_base64(text, strict_mode=True), kind).reshape(shape)
    if found.size and found.max() > np.iinfo(np.int16).max:
        raise ValueError(f"routings to expert {found.max()}")
    return found.astype(np.int16)


def parse_versions(spans: Sequence[tuple[str, int, int]], length: int) -> tuple[VersionSpan, ...]:
    """Spans of the wire as records; neighbours of one version become one. Raises ValueError unless they cover all of
    `length` tokens without gaps."""
    return join_versions([VersionSpan(Version.parse(version), int(start), int(end)) for version, start, end in spans], length)


def join_versions(spans: Sequence[VersionSpan], length: int) -> tuple[VersionSpan, ...]:
    """The same spans with neighbours of one version joined. Raises ValueError unless they cover `length` tokens."""
    joined: list[VersionSpan] = []
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            raise ValueError(f"version spans with a gap or overlap at token {end}")
        end = span.end
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(span.version, joined[-1].start, end)
        else:
            joined.append(span)
    if end != length:
        raise ValueError(f"version spans end at token {end} of {length}")
    return tuple(joined)


def continue_answer(first: Answer, more: Answer) -> Answer:
    """An aborted answer and what was sampled behind it, as one."""
    shift = len(first.output_ids)
    routings = more.routings
    if first.routings is not None and routings is not None:  # what was sampled stays with the experts that it went to then
        routings = np.concatenate([first.routings, routings[len(first.routings) :]])
    spans = (*first.versions, *(VersionSpan(s.version, s.start + shift, s.end + shift) for s in more.versions))
    return Answer(
        output_ids=np.concatenate([first.output_ids, more.output_ids]),
        logprobs=np.concatenate([first.logprobs, more.logprobs]),
        versions=join_versions(spans, shift + len(more.output_ids)),
        finish_reason=more.finish_reason,
        routings=routings,
    )
