"""A sampler without an engine: it answers from a tape that a real one has recorded, over the same HTTP, and takes part in the
weights' group with the real transport and digest. It starts in the time that torch takes to be imported.

Answers are the tape's, in turn: the recorded ones of a prompt where the prompt was asked then, any others elsewhere. Their
versions are shifted so that the last token is of the version served now; the pauses of commits are the recorded ones.
"""

import asyncio
import itertools
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from prl.control.child import Child, run_child
from prl.control.client import ControlClient
from prl.control.token import is_authorized
from prl.flow.versions import Version

if TYPE_CHECKING:
    from prl.sampler.link import Link
    from prl.weights.transport import Whole

TAPE = Path(__file__).with_name("tape.jsonl")
TOKEN_S = float(os.environ.get("PRL_FAULTS_TOKEN_S", "0.005"))  # so that answers are in flight while versions change


class Tape:
    def __init__(self, path: Path = TAPE) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        by_prompt = defaultdict(list)
        for line in lines:
            if line["route"] == "/prl/generate":
                by_prompt[tuple(line["request"]["token_ids"])] += line["answer"]["answers"]
        self._known = {prompt: itertools.cycle(answers) for prompt, answers in by_prompt.items()}
        self._others = itertools.cycle([answer for answers in by_prompt.values() for answer in answers])
        self._pauses = itertools.cycle([line["answer"] for line in lines if line["route"] == "/prl/weights/commit"])

    def answer(self, prompt: list[int], served: Version) -> dict:
        answer = next(self._known.get(tuple(prompt), self._others))
        recorded = [Version.parse(version).step for version, _, _ in answer["versions"]]
        shift = served.step - recorded[-1]
        spans = [
            [str(Version(served.lineage, max(0, step + shift))), start, end]
            for step, (_, start, end) in zip(recorded, answer["versions"], strict=True)
        ]
        return {**answer, "versions": spans}

    def pause(self) -> dict:
        return dict(next(self._pauses))


class ReplayedSampler:
    def __init__(self, child: Child, client: ControlClient) -> None:
        self._child = child
        self._client = client
        self._tape = Tape()
        self._version: Version | None = None
        self._staged: tuple[Version, int] | None = None
        self._held: Whole | None = None
        self._link: Link | None = None
        self._loop = asyncio.get_running_loop()

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=2**26)
        for route in ("generate", "weights/connect", "weights/receive", "weights/commit", "weights/fence"):
            application.router.add_post(f"/prl/{route}", getattr(self, f"_{route.rpartition('/')[2]}"))
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler):
        if not is_authorized(request.headers.get("Authorization", ""), self._child.token):
            return web.json_response({"error": "this run's token is missing or wrong"}, status=401)
        if self._version is None and request.path == "/prl/generate":
            return web.json_response({"error": "no weights yet"}, status=503)
        return web.json_response(await handler(await request.json()))

    async def _generate(self, body: dict) -> dict:
        sampling = body["sampling_params"]
        await asyncio.sleep(TOKEN_S * sampling["max_tokens"])
        assert self._version is not None
        return {"answers": [self._tape.answer(body["token_ids"], self._version) for _ in range(sampling["n"])]}

    async def _connect(self, body: dict) -> dict:
        from prl.sampler.link import Link
        from prl.weights.transport import SamplerEnd

        if self._link is not None:
            self._link.leave()
        self._staged = self._held = None
        where = (body["master_address"], body["master_port"], body["rank_offset"], body["world_size"], body["epoch"])
        self._link = Link(body["epoch"], lambda left: SamplerEnd(*where, body["timeout_s"], left=left))
        return {}

    async def _receive(self, body: dict) -> dict:
        link = self._link
        assert link is not None
        assert link.epoch == body["epoch"]
        self._staged = None
        link.do(lambda: self._take(link, body))
        return {}

    async def _commit(self, body: dict) -> dict:
        version = Version(body["lineage"], body["step"])
        assert self._staged == (version, int(body["digest"])), (self._staged, body)
        self._version = version
        return {**self._tape.pause(), "digest": body["digest"]}

    async def _fence(self, body: dict) -> dict:
        self._version = None
        return {}

    def _take(self, link: "Link", body: dict) -> None:
        """In the link's thread."""
        from prl.weights.digest import digest
        from prl.weights.plan import from_json
        from prl.weights.transport import Whole

        began = time.monotonic()
        update_s = self._child.config.weights.update_s
        report = {"replica": self._child.index, "worker": 0} | {key: body[key] for key in ("lineage", "step", "epoch")}
        try:
            if link.end is None:
                raise RuntimeError(link.no_group)
            held, self._held = self._held, None
            specs, deltas = from_json(body["tensors"]), self._child.config.weights.delta
            tensors = link.end.receive(specs, body["bucket_bytes"], update_s, deltas=deltas, held=held)
            staged = Version(body["lineage"], body["step"]), digest(tensors)
            report |= {"digest": str(staged[1]), "receive_s": time.monotonic() - began, "direct_share": 1.0}
        except Exception as error:  # the orchestrator waits for this report
            report |= {"error": f"{type(error).__name__}: {error}", "missing": [], "halt": None}
        if link.left:
            return
        if "error" not in report:
            self._staged = staged
            self._held = Whole(tensors, staged[1]) if deltas else None
        call = self._client.call("staged", report, deadline_s=update_s, reason="reporting a staged version")
        asyncio.run_coroutine_threadsafe(call, self._loop).result(update_s)


async def serve(child: Child, client: ControlClient) -> None:
    import torch

    torch.set_num_threads(1)
    sampler = ReplayedSampler(child, client)
    runner = web.AppRunner(sampler.application())
    await runner.setup()
    await web.TCPSite(runner, child.host, child.port).start()
    await client.join({"url": f"http://{child.host}:{child.port}", "workers": 1})
    client.progress("serving")
    await client.stopping.wait()
    await runner.cleanup()


def main() -> None:
    run_child(serve)
