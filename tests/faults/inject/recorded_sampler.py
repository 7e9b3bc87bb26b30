"""Runs the real sampler and writes the HTTP conversation of the routes that runs use to a file: the tape that
`replayed_sampler` plays. Started by `sitecustomize` in place of `prl.sampler` where PRL_FAULTS_SAMPLER is "record" and
PRL_FAULTS_RECORD names the file. The tape here is of

    prl-submit configs/quickstart.yaml --set run.steps=8 run.groups_per_step=4 run.rollouts_per_group=4 \\
        run.evaluate_every_steps=0 run.stop_at_reward=null train.tensor_parallel=1
"""

import json
import os
import runpy
from pathlib import Path

import prl.sampler.middleware as middleware

ROUTES = ("/prl/generate", "/prl/weights/connect", "/prl/weights/receive", "/prl/weights/commit")


class RecordingGuard(middleware.Guard):
    """Notes each request's body and its answer; `tensors` are left out, being what any trainer offers."""

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] not in ROUTES:
            await super().__call__(scope, receive, send)
            return
        asked, answered, status = [], [], []

        async def noted_receive():
            message = await receive()
            asked.append(message.get("body", b""))
            return message

        async def noted_send(message):
            if message["type"] == "http.response.start":
                status.append(message["status"])
            else:
                answered.append(message.get("body", b""))
                if not message.get("more_body"):
                    note(scope["path"], b"".join(asked), status[0], b"".join(answered))
            await send(message)

        await super().__call__(scope, noted_receive, noted_send)


def note(route: str, asked: bytes, status: int, answered: bytes) -> None:
    request = json.loads(asked)
    request.pop("tensors", None)
    line = {"route": route, "request": request, "status": status, "answer": json.loads(answered)}
    with Path(os.environ["PRL_FAULTS_RECORD"]).open("a") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def main() -> None:
    middleware.Guard = RecordingGuard
    runpy.run_module("prl.sampler", run_name="__main__", alter_sys=True)
