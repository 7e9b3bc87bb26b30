"""Asks the samplers: merges equal prompts, spreads requests over replicas, tries again elsewhere, all until a deadline.

Prompts asked for in one turn of the event loop with equal parameters go out as one request with n answers, which costs a
sampler a third of n requests. A replica that cannot be reached or answers 503 or the like rests for a while, and
the request goes to another one. An aborted answer is continued from its last token.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeGuard

import aiohttp
import numpy as np

from prl.actor.replies import Answer, continue_answer, parse_reply
from prl.control.token import authorization
from prl.domains.api import SamplerError
from prl.streams.records import Int32, Turn

_FIRST_REST_S = 0.05
_LONGEST_REST_S = 5.0
_LEAVING_S = 2.0  # time that a fenced replica has to hand back its partial answers
_CONNECT_S = 10.0
_ELSEWHERE = frozenset({401, 408, 429})  # what another server, or this one later, may answer differently
_CONNECTIONS = 512  # more requests than that wait here for a connection


@dataclass(frozen=True, slots=True)
class Parameters:
    max_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Replica:
    index: int
    url: str
    tokens_in_flight: int = 0  # most tokens that its unanswered requests may hold
    rest_s: float = 0.0
    resting_until: float = 0.0  # on the loop's clock
    gone: bool = False
    deadlines: set[asyncio.Timeout] = field(default_factory=set)  # of its unanswered requests


@dataclass(slots=True, eq=False)
class _Question:
    """One prompt, asked `len(futures)` times."""

    prompt_ids: tuple[int, ...]
    parameters: Parameters
    futures: list[asyncio.Future[Turn]]


class _Unavailable(Exception):
    """This replica cannot answer now; another one may."""


class SamplerClient:
    """Used as an async context manager. `counts` counts what went wrong and was mended, by reason."""

    def __init__(self, token: str, *, request_s: float, max_model_len: int, max_answers: int, vocabulary: int) -> None:
        """`request_s`: deadline of one question with all its tries, in seconds. `max_model_len`: longest prompt and answer, in
        tokens. `max_answers`: most answers that a sampler gives to one request. `vocabulary`: number of token ids."""
        self.counts: Counter[str] = Counter()
        self._headers = {**authorization(token), "Content-Type": "application/json"}
        self._request_s = request_s
        self._max_model_len = max_model_len
        self._max_answers = max_answers
        self._vocabulary = vocabulary
        self._replicas: dict[int, _Replica] = {}
        self._replicas_changed = asyncio.Event()
        self._pending: dict[tuple[tuple[int, ...], Parameters], _Question] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels what is in flight, which makes the samplers drop it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def set_replicas(self, urls: Mapping[int, str]) -> None:
        """The replicas that may be asked, by index. Requests at one that is no longer among them get a moment to come back
        and then go elsewhere."""
        loop = asyncio.get_running_loop()
        changed = False
        for replica in list(self._replicas.values()):
            if urls.get(replica.index) != replica.url:
                del self._replicas[replica.index]
                replica.gone = changed = True
                end = loop.time() + _LEAVING_S
                for deadline in replica.deadlines:
                    if not deadline.expired():
                        deadline.reschedule(min(end, deadline.when() or end))
        for index, url in urls.items():
            if index not in self._replicas:
                self._replicas[index] = _Replica(index, url)
                changed = True
        if changed:
            self._wake()

    def sampler(self, max_tokens: int, temperature: float, top_p: float) -> "BoundSampler":
        """This client with defaults, as domains see it."""
        return BoundSampler(self, Parameters(max_tokens, temperature, top_p))

    async def ask(self, prompt_ids: tuple[int, ...], parameters: Parameters) -> Turn:
        """One answer. Raises SamplerError."""
        if self._session is None:
            raise SamplerError("closed", "the sampler client is not open")
        key = (prompt_ids, parameters)
        question = self._pending.get(key)
        loop = asyncio.get_running_loop()
        if question is None:
            self._check(prompt_ids)
            if not self._pending:
                loop.call_soon(self._send_pending)
            question = self._pending[key] = _Question(prompt_ids, parameters, [])
        future: asyncio.Future[Turn] = loop.create_future()
        question.futures.append(future)
        return await future

    def _check(self, prompt_ids: tuple[int, ...]) -> None:
        """Raises SamplerError where there are ids that every sampler would refuse."""
        ids = np.array(prompt_ids)
        if len(ids) and (ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self._vocabulary):
            known = range(self._vocabulary)
            wrong = next((i for i in prompt_ids if not isinstance(i, int | np.integer) or int(i) not in known), prompt_ids)
            raise SamplerError("refused", f"prompt ids must be whole numbers from 0 to {known[-1]}, got {wrong!r:.100}")

    def _send_pending(self) -> None:
        questions, self._pending = self._pending, {}
        for question in questions.values():
            for start in range(0, len(question.futures), self._max_answers):
                futures = question.futures[start : start + self._max_answers]
                self._start(_Question(question.prompt_ids, question.parameters, futures))

    def _start(self, question: _Question) -> None:
        task = asyncio.create_task(self._answer(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        left = len(question.futures)

        def one_done(future: asyncio.Future[Turn]) -> None:
            nonlocal left
            left -= 1
            if left == 0 and not task.done() and future.cancelled():
                task.cancel()  # nobody waits any more: closing the connection makes the sampler drop the request

        for future in question.futures:
            future.add_done_callback(one_done)

    async def _answer(self, question: _Question) -> None:
        """Sets the result or the error of each of the question's futures."""
        started = time.time()
        deadline = asyncio.get_running_loop().time() + self._request_s
        futures = question.futures
        prompt = np.array(question.prompt_ids, dtype=np.int32)  # shared by all turns
        try:
            replica, answers = await self._request(prompt.tolist(), question.parameters, len(futures), deadline)
            aborted = {k: answer for k, answer in enumerate(answers) if _was_aborted(answer)}
            for k, answer in enumerate(answers):
                if k not in aborted:
                    _settle(futures[k], prompt, answer, replica, started)
            if aborted:
                continued = (
                    self._continue(question.parameters, prompt, futures[k], answer, replica, started, deadline)
                    for k, answer in aborted.items()
                )
                await asyncio.gather(*continued)
        except SamplerError as error:
            for future in futures:  # an exception of its own each: tracebacks grow where one is raised in several tasks
                _settle(future, prompt, SamplerError(error.reason, str(error)), -1, started)
        except Exception as error:
            for future in futures:
                _settle(future, prompt, error, -1, started)
        finally:
            for future in futures:
                future.cancel()  # what is not settled by now was cancelled with this task

    async def _continue(
        self,
        parameters: Parameters,
        prompt: Int32,
        future: asyncio.Future[Turn],
        answer: Answer,
        replica: int,
        started: float,
        deadline: float,
    ) -> None:
        """Goes on behind an aborted answer until it ends otherwise, and settles its future."""
        try:
            while answer.finish_reason == "abort" and not future.done():
                self.counts["aborted"] += 1
                left = parameters.max_tokens - len(answer.output_ids)
                if left <= 0:
                    answer = replace(answer, finish_reason="length")
                    break
                prompt_ids = [*prompt.tolist(), *answer.output_ids.tolist()]
                rest = Parameters(left, parameters.temperature, parameters.top_p, parameters.stop_token_ids)
                replica, (more,) = await self._request(prompt_ids, rest, 1, deadline)
                if isinstance(more, SamplerError):
                    raise more
                answer = continue_answer(answer, more)
        except SamplerError as error:
            _settle(future, prompt, error, replica, started)
        else:
            _settle(future, prompt, answer, replica, started)

    async def _request(
        self, prompt_ids: list[int], parameters: Parameters, n: int, deadline: float
    ) -> tuple[int, list[Answer | SamplerError]]:
        """Replica and answers, from whichever replica gives them before the deadline (on the loop's clock)."""
        room = self._max_model_len - len(prompt_ids)
        if room < 1 or not prompt_ids:
            raise SamplerError(
                "too_long", f"a prompt of {len(prompt_ids)} tokens does not fit sample.max_model_len {self._max_model_len}"
            )
        max_tokens = min(parameters.max_tokens, room)
        body = json.dumps(
            {
                "token_ids": prompt_ids,
                "sampling_params": {
                    "n": n,
                    "max_tokens": max_tokens,
                    "temperature": parameters.temperature,
                    "top_p": parameters.top_p,
                    "stop_token_ids": parameters.stop_token_ids,
                },
            },
            separators=(",", ":"),
        ).encode()
        tokens = len(prompt_ids) + n * max_tokens
        last_trouble = "no replica was known"
        while True:
            replica = await self._pick(deadline, last_trouble)
            replica.tokens_in_flight += tokens
            try:
                reply = await self._post(replica, body, deadline)
            except _Unavailable as trouble:
                last_trouble = str(trouble)
                self.counts["retried"] += 1
                self._rest(replica)
                continue
            finally:
                replica.tokens_in_flight -= tokens
            replica.rest_s = 0.0
            answers = parse_reply(reply, n, len(prompt_ids))
            if any(_was_aborted(answer) for answer in answers):
                self._rest(replica)  # it is being fenced or emptied: others first
            return replica.index, answers

    async def _post(self, replica: _Replica, body: bytes, deadline: float) -> Any:
        """The decoded reply. Raises _Unavailable where another try may help, SamplerError where none will."""
        assert self._session is not None
        where = f"sampler {replica.index} at {replica.url}"
        timeout = asyncio.timeout_at(deadline)
        replica.deadlines.add(timeout)
        try:
            async with timeout, self._session.post(f"{replica.url}/prl/generate", data=body) as response:
                data = await response.read()
                status = response.status
        except TimeoutError:
            if not timeout.expired():
                raise _Unavailable(f"{where} did not accept a connection within {_CONNECT_S:.0f} s") from None
            if replica.gone and asyncio.get_running_loop().time() < deadline:
                raise _Unavailable(f"{where} was withdrawn") from None
            raise SamplerError("deadline", f"no answer from {where} within {self._request_s:.0f} s") from None
        except aiohttp.ClientError as error:
            raise _Unavailable(f"{where}: {error!r}") from error
        finally:
            replica.deadlines.discard(timeout)
        if status == 200:
            try:
                return json.loads(data)
            except ValueError as error:
                raise SamplerError("malformed", f"{where}: reply is not JSON: {error}: {data[:200]!r}") from error
        trouble = f"{where} answered {status}: {data[:300].decode(errors='replace')}"
        if status >= 500 or status in _ELSEWHERE:
            raise _Unavailable(trouble)
        raise SamplerError("refused", trouble)

    async def _pick(self, deadline: float, last_trouble: str) -> _Replica:
        """The replica with the fewest tokens in flight that is not resting; waits for one until the deadline."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            if now >= deadline:
                raise SamplerError(
                    "deadline", f"no sampler took a request within {self._request_s:.0f} s; last: {last_trouble}"
                )
            ready = [replica for replica in self._replicas.values() if replica.resting_until <= now]
            if ready:
                return min(ready, key=lambda replica: (replica.tokens_in_flight, replica.index))
            until = min([deadline, *(replica.resting_until for replica in self._replicas.values())])
            try:
                async with asyncio.timeout_at(until):
                    await self._replicas_changed.wait()
            except TimeoutError:
                pass  # a rest is over, or the deadline has come

    def _rest(self, replica: _Replica) -> None:
        replica.rest_s = min(max(2 * replica.rest_s, _FIRST_REST_S), _LONGEST_REST_S)
        replica.resting_until = asyncio.get_running_loop().time() + replica.rest_s

    def _wake(self) -> None:
        self._replicas_changed.set()
        self._replicas_changed = asyncio.Event()


class BoundSampler:
    """Implements `prl.domains.api.Sampler` with the config's values where a domain gives none."""

    def __init__(self, client: SamplerClient, defaults: Parameters) -> None:
        self._client = client
        self._defaults = defaults

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stop_token_ids: Iterable[int] = (),
    ) -> Turn:
        defaults = self._defaults
        parameters = Parameters(
            defaults.max_tokens if max_tokens is None else max_tokens,
            defaults.temperature if temperature is None else temperature,
            defaults.top_p if top_p is None else top_p,
            tuple(stop_token_ids),
        )
        return await self._client.ask(tuple(prompt_ids), parameters)


def _was_aborted(answer: Answer | SamplerError) -> TypeGuard[Answer]:
    return isinstance(answer, Answer) and answer.finish_reason == "abort"


def _settle(future: asyncio.Future[Turn], prompt: Int32, answer: Answer | Exception, replica: int, started: float) -> None:
    if future.done():  # its rollout was cancelled
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
        return
    future.set_result(
        Turn(
            prompt_ids=prompt,
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=answer.finish_reason,
            replica=replica,
            started=started,
            ended=time.time(),
            routings=answer.routings,
        )
    )
