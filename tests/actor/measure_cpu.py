"""CPU of an actor on the digits task, per rollout: run by hand, `python tests/actor/measure_cpu.py`.

Sampler and orchestrator are stand-ins in a process of their own, so that the actor's process is measured alone.
"""

import asyncio
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from stand_in import TOKEN, SamplerStandIn, choice, reply

from prl.actor.loop import Actor, Parts
from prl.actor.options import ActorOptions
from prl.actor.publisher import rollout_publisher
from prl.actor.sampler_client import SamplerClient
from prl.actor.tasks import load_tasks
from prl.actor.tokenizer import ModelTokenizer
from prl.control.client import ControlClient
from prl.control.options import ControlOptions
from prl.control.server import ControlServer
from prl.domains.options import DomainOptions
from prl.metrics.events import MetricsWriter
from prl.runfolder.model import write_model_folder
from prl.runfolder.paths import RunFolder
from prl.streams.options import StreamsOptions
from prl.trainer.options import ModelOptions
from prl.verifier.client import VerifierClient

STEPS, GROUPS, ROLLOUTS = 20, 32, 16


def others(pipe) -> None:
    asyncio.run(serve(pipe))


async def serve(pipe) -> None:
    answers = [
        reply([choice(random.choices(range(10), k=5), finish_reason="length") for _ in range(ROLLOUTS)]) for _ in range(50)
    ]
    left = STEPS * GROUPS
    done = 0
    finished = asyncio.Event()
    async with SamplerStandIn(lambda body: random.choice(answers)) as sampler:

        async def lease(member, body):
            nonlocal left
            leases = [
                {
                    "kind": "train",
                    "domain": "digits",
                    "index": left - k,
                    "epoch": 0,
                    "group": left - k,
                    "issue": 0,
                    "rollouts": ROLLOUTS,
                }
                for k in range(min(body["groups"], left))
            ]
            left -= len(leases)
            if not leases:
                await finished.wait()
            return {
                "leases": leases,
                "stop": not leases,
            }

        async def rollouts(member, body):
            nonlocal done
            done += len(body["groups"])
            if done == STEPS * GROUPS:
                finished.set()
            return {"late": []}

        async def wanted(member, body):
            await finished.wait()
            return {"groups": None}

        async def samplers(member, body):
            if body["known"]:
                await finished.wait()
            return {"samplers": [[0, sampler.url]]}

        async def verifier(member, body):
            await finished.wait()

        handlers = {"verifier": verifier, "lease": lease, "rollouts": rollouts, "wanted": wanted, "samplers": samplers}
        server = ControlServer(TOKEN, handlers, on_join=print, on_fail=print)
        pipe.send(await server.start("127.0.0.1"))
        await asyncio.to_thread(pipe.recv)


async def measure(url: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = RunFolder(Path(name) / "run")
        run.create()
        write_model_folder(ModelOptions(init="random", architecture="qwen2"), run.model)
        tasks = load_tasks([DomainOptions(name="digits")], 1, ModelTokenizer(run.model), None)
        with MetricsWriter(run.metrics, "actor", 0, 1) as metrics:
            async with (
                ControlClient(url, TOKEN, "actor", 0, ControlOptions()) as control,
                SamplerClient(TOKEN, request_s=60, max_model_len=64, max_answers=512, vocabulary=16) as samplers,
                VerifierClient(TOKEN, deadline_s=5) as verifier,
            ):
                publisher = rollout_publisher(run, "run", 1, control, StreamsOptions(), ControlOptions())
                parts = Parts(tasks, control, samplers, verifier, publisher, metrics)
                cpu, wall = time.process_time(), time.perf_counter()
                await Actor(parts, ActorOptions(), call_s=60).run()
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                n = STEPS * GROUPS * ROLLOUTS
                print(
                    f"{n} rollouts: {1e3 * cpu / n:.3f} ms of CPU a rollout, {n / wall:.0f} rollouts/s",
                    Counter(samplers.counts),
                )


if __name__ == "__main__":
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=others, args=(there,))
    process.start()
    try:
        if "--profile" in sys.argv:
            import cProfile
            import pstats

            with cProfile.Profile() as profile:
                asyncio.run(measure(here.recv()))
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        else:
            asyncio.run(measure(here.recv()))
    finally:
        here.send("end")
        process.join(10)
