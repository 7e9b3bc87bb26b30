"""What the orchestrator asks of samplers over HTTP, and what it makes of those that refuse, are late or cannot be reached."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from prl.control.token import authorization
from prl.flow.membership import Reason
from prl.orchestrator.replicas import TELL_S, Replica, ReplicaDesk

AGENT_S = 1.0  # that a node agent has to say that a sampler which cannot be reached has ended
log = logging.getLogger(__name__)


class Refused(Exception):
    """A sampler answered that it will not."""


class NoAnswer(Exception):
    """A sampler did not answer in time, or failed at what it was asked."""


class Unreachable(NoAnswer):
    """The connection to a sampler broke off, or there was none."""


class SamplerCalls:
    """POST /prl/weights/<verb> to one sampler or several."""

    def __init__(self, token: str, desk: ReplicaDesk) -> None:
        self._desk = desk
        self._session = aiohttp.ClientSession(headers=authorization(token))

    async def tell_fenced(self, replica: Replica, reason: str) -> None:
        """Have a replica abort what it holds, if it still answers."""
        try:
            await self.post(replica, "fence", {"reason": reason}, TELL_S)
        except (Refused, NoAnswer) as error:
            log.warning("%s cannot be told that it is fenced: %s", replica.name, error)

    async def close(self) -> None:
        await self._session.close()

    async def all(
        self, replicas: Sequence[Replica], verb: str, bodies: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> dict[Replica, dict[str, Any]]:
        """Ask all of these at once. The answers of those that are still there and did as they were told; the others have
        been fenced or closed. Raises Refused where all of them refuse: then it is not they who are wrong."""
        asked = [self.ask(replica, verb, body, timeout_s) for replica, body in zip(replicas, bodies, strict=True)]
        found = dict(zip(replicas, await asyncio.gather(*asked), strict=True))
        refusals = {replica: answer for replica, answer in found.items() if isinstance(answer, Refused)}
        if refusals and len(refusals) == len(found):
            raise next(iter(refusals.values()))
        for replica, refusal in refusals.items():
            if verb == "commit" and not replica.gone.is_set():
                self._desk.mismatched(replica, str(refusal))
            else:
                self.fence(replica, "refused", str(refusal))
        return {replica: answer for replica, answer in found.items() if isinstance(answer, dict) and not replica.gone.is_set()}

    async def ask(
        self, replica: Replica, verb: str, body: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any] | Refused | None:
        """Its answer, or its refusal; None: the replica is gone, of this or before."""
        post = asyncio.create_task(self.post(replica, verb, body, timeout_s))
        gone = asyncio.create_task(replica.gone.wait())
        try:
            await asyncio.wait({post, gone}, return_when=asyncio.FIRST_COMPLETED)
            return post.result() if post.done() else None
        except Refused as refusal:
            return refusal
        except Unreachable as error:
            with contextlib.suppress(TimeoutError):  # most likely its process has ended: its node agent can say how
                await asyncio.wait_for(replica.gone.wait(), AGENT_S)
            self.fence(replica, "unreachable", str(error))
            return None
        except NoAnswer as error:
            self.fence(replica, "late", str(error))
            return None
        finally:
            post.cancel()
            gone.cancel()

    def fence(self, replica: Replica, reason: Reason, words: str) -> None:
        """Unless it is gone: another process of its name may be there by now."""
        if not replica.gone.is_set():
            self._desk.fence(replica.index, reason, words)

    async def post(self, replica: Replica, verb: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Raises Refused or NoAnswer; nobody is fenced."""
        url = f"{replica.url}/prl/weights/{verb}"
        try:
            async with self._session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                if response.status >= 500:
                    raise NoAnswer(f"{replica.name} failed at {verb}: {response.status} {await response.text()}")
                if response.status != 200:
                    raise Refused(f"{replica.name} refused {verb}: {response.status} {await response.text()}")
                answer: dict[str, Any] = await response.json()
                return answer
        except TimeoutError as error:
            raise NoAnswer(f"{replica.name} at {url} did not answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise Unreachable(f"{replica.name} at {url} cannot be reached: {error!r}") from error
