"""CPU of a sampler for one step of the quickstart: 32 requests of 16 answers of 5 tokens. Run by hand:

    python tests/sampler/measure_cpu.py [ROUNDS] NAME=JSON ...

Each NAME=JSON is a variant: changes to the sample options, with "engine_args" for vLLM's, "route" for the route to ask,
"env" for the environment. The first one is what the others are compared with. Their samplers run side by side and are asked
in turn, so that whatever else this machine does meets all alike.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
from lab import Lab
from launch import sampler
from tiny_models import tiny_model, weights_of

from prl.control.token import authorization
from prl.sampler.options import SampleOptions

GROUPS, ROLLOUTS, TOKENS = 32, 16, 5
BASE = SampleOptions(dtype="float32", max_model_len=128, max_num_seqs=512, kv_cache_mib=64, enforce_eager=True)


def body(prompt: list[int]) -> dict:
    sampling = {"n": ROLLOUTS, "max_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [], "logprobs": 0}
    return {"token_ids": prompt, "sampling_params": sampling | {"detokenize": False, "flat_logprobs": True}}


async def step(url: str, token: str, bodies: list[bytes]) -> None:
    headers = authorization(token) | {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=512)) as session:

        async def ask(data: bytes) -> None:
            async with session.post(url, data=data) as response:
                answer = await response.read()
                assert response.status == 200, answer

        await asyncio.gather(*(ask(data) for data in bodies))


def cpu_s(lab: Lab) -> list[float]:
    """Of the server's process and of its children."""
    process = psutil.Process(lab.process.pid)
    return [sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True))]


def measure(lab: Lab, route: str) -> list[float]:
    """CPU seconds of one step: server, then children; wall last."""
    bodies = [json.dumps(body([random.randrange(10) for _ in range(4)] + [10])).encode() for _ in range(GROUPS)]
    before, began = cpu_s(lab), time.perf_counter()
    lab.run(step(lab.url + route, lab.token, bodies)).result(60)
    wall_s = time.perf_counter() - began
    return [b - a for a, b in zip(before, cpu_s(lab), strict=True)] + [wall_s]


def main(arguments: list[str]) -> None:
    rounds = int(arguments.pop(0)) if arguments and arguments[0].isdecimal() else 30
    variants = {name: json.loads(text) for name, _, text in (word.partition("=") for word in arguments)} or {"base": {}}
    with ExitStack() as stack:
        labs = {}
        for name, changes in variants.items():
            route = changes.pop("route", "/inference/v1/generate")
            environment = changes.pop("env", {})
            os.environ.update(environment)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            lab = stack.enter_context(sampler(folder, replace(BASE, **changes)))
            for key in environment:
                del os.environ[key]
            lab.update(weights_of(tiny_model(0)))
            labs[name] = (lab, route)
        found: dict[str, list[list[float]]] = {name: [] for name in variants}
        for number in range(-5, rounds):
            for name, (lab, route) in labs.items():
                spent = measure(lab, route)
                if number >= 0:
                    found[name].append(spent)
        base = [sum(one[:-1]) for one in next(iter(found.values()))]
        for name, steps in found.items():
            sums = [sum(one[:-1]) for one in steps]
            ratios = [a / b for a, b in zip(sums, base, strict=True)]
            parts = [round(1e3 * statistics.mean(part)) for part in zip(*steps, strict=True)]
            print(
                f"{name:12} CPU ms a step: mean {1e3 * statistics.mean(sums):.0f}, smallest {1e3 * min(sums):.0f}; mean ratio "
                f"{sum(sums) / sum(base):.3f}, median of ratios {statistics.median(ratios):.3f}; "
                f"processes {parts[:-1]}, wall ms {parts[-1]}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
