"""Sampling while new weights arrive, on a real vLLM server: tokens/s during transfers, and the length of pauses.

    python tools/bench/inflight.py [--rounds 5] [--window-s 4] [--sequences 8] [--bucket-mib 8]

One trainer rank, a process of its own, sends a model of 105 MB (float32) by lanes to a sampler, which answers some sequences
all the time. Each round lasts `--window-s` three times over:

    alone      nothing else
    transfer   one update after another; what counts are the times from the order to receive to the verified version
    burnt      two processes burn the processor time that the transfers of this round took a second: one that of the trainer's
               process, one that of the sampler's threads which receive

`transfer to burnt`: tokens/s, the share that is left where a transfer costs nothing but its processor time. `pause to
transfer`: the sampler's pause for a version to the time of its transfer, as the sampler reports them. It wants two cores that
do nothing else, as the sampler's own start does.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sampler"))
from lab import EOS, HOST, WEIGHTS, Lab, Weights, sampler, weights_of

from prl.config.hf_config import read_model_config
from prl.config.layout import layout_of
from prl.control.token import authorization
from prl.sampler.options import SampleOptions
from prl.trainer.options import TrainOptions
from prl.weights.compile import compile_plan
from prl.weights.crew import Crew
from prl.weights.digest import digest
from prl.weights.lanes import LaneSender, Route
from prl.weights.plan import Tile, to_json
from prl.weights.shards import sampler_shards

LIMIT_S = 300.0
LONGEST_TOKENS = 900


def small_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=12,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).to(torch.float32)


class Trainer:
    """The sending rank, in a process of its own."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def join(self, route: Route, crew: Crew, port: int) -> None:
        self._matrices = [self._weights[spec.name].reshape(spec.shape[0], -1) for spec in route.plan.tensors]
        self._sender = LaneSender(route, crew, 0, HOST, port, group_s=LIMIT_S)

    def send(self) -> None:
        def source(tile: Tile) -> torch.Tensor:
            return self._matrices[tile.tensor][tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns]

        self._sender.send(source, LIMIT_S)


class Burner:
    """Takes a share of a core."""

    def burn(self, share: float, seconds: float) -> None:
        began, spent_s = time.monotonic(), time.process_time()
        while (passed_s := time.monotonic() - began) < seconds:
            if time.process_time() - spent_s > share * passed_s:
                time.sleep(0.001)


class Process:
    """Does what it is told, and says how much processor time that took. Forked before this one has threads."""

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def spent_s(self) -> float:
        """Waits until it is done."""
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"a process did not do within {LIMIT_S:.0f} s what it was told")
        return float(self._pipe.recv())

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _live(pipe: Connection, make: Callable[[], Any]) -> None:
    os.setsid()  # a session of its own, as each process of a run has: systems share processors out between sessions
    actor = make()
    while True:
        name, arguments = pipe.recv()
        spent_s = time.process_time()
        getattr(actor, name)(*arguments)
        pipe.send(time.process_time() - spent_s)


@dataclass
class Load:
    """Sequences that are asked for all the time, each in a connection of its own."""

    lab: Lab
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # monotonic time, tokens

    def start(self, sequences: int) -> "Future[Any]":
        async def all_of_them() -> None:
            async with aiohttp.ClientSession(headers=authorization(self.lab.token)) as session:
                await asyncio.gather(*(self._ask(session, number) for number in range(sequences)))

        return self.lab.run(all_of_them())

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        sampling = {"temperature": 1.0, "detokenize": False, "ignore_eos": True, "max_tokens": LONGEST_TOKENS}
        body = {"token_ids": [number + 1], "sampling_params": sampling, "stream": True}
        while True:
            async with session.post(self.lab.url + "/inference/v1/generate", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        tokens = len(json.loads(line[6:])["choices"][0]["token_ids"])
                        self.arrivals.append((time.monotonic(), tokens))

    def rate(self, spans: Sequence[tuple[float, float]]) -> float:
        """Tokens a second of these spans."""
        arrivals = list(self.arrivals)
        tokens = sum(count for at, count in arrivals if any(begin < at <= end for begin, end in spans))
        return tokens / sum(end - begin for begin, end in spans)


class Updates:
    """Both ends of the lanes, driven as the orchestrator would."""

    def __init__(self, lab: Lab, trainer: Process, weights: Weights, bucket_bytes: int) -> None:
        self._lab, self._trainer, self._digest = lab, trainer, digest(weights)
        model = read_model_config(lab.folder.model)
        plan = compile_plan(model, layout_of(TrainOptions()), 1, 1, "float32")
        route = Route(plan, sampler_shards(model, 1), bucket_bytes)
        lab.epoch += 1
        self._order = {"lineage": 0, "epoch": lab.epoch, "tensors": to_json(plan.tensors), "bucket_bytes": bucket_bytes}
        self._others = {thread.id for thread in psutil.Process(lab.process.pid).threads()}
        facts = lab.facts(os.environ, plan=plan.digest(), bucket_bytes=bucket_bytes)
        who = {"facts": facts, "lanes": {"trainer_ranks": 1, "samplers": [0]}, "timeout_s": LIMIT_S}
        self._post("connect", lab.meeting(lab.epoch) | who)
        trainer.tell("join", route, Crew(lab.epoch, 1, (0,), 1), lab.trainer.master_port)
        trainer.spent_s()

    def _post(self, what: str, body: dict[str, Any]) -> Any:
        reply = self._lab.request("POST", f"/prl/weights/{what}", body, timeout_s=LIMIT_S)
        assert reply.status == 200, reply
        return reply.body

    def received_s(self) -> float:
        """Processor time of the sampler's threads that came with the lanes."""
        threads = psutil.Process(self._lab.process.pid).threads()
        return sum(thread.user_time + thread.system_time for thread in threads if thread.id not in self._others)

    def update(self) -> "Update":
        lab = self._lab
        lab.step += 1
        began, received_s = time.monotonic(), self.received_s()
        self._post("receive", self._order | {"step": lab.step})
        self._trainer.tell("send")
        sent_s = self._trainer.spent_s()
        staged = lab.staged.get(timeout=LIMIT_S)
        assert "error" not in staged, staged
        ended, received_s = time.monotonic(), self.received_s() - received_s
        commit = {"lineage": 0, "step": lab.step, "digest": str(self._digest), "clear_cache": False}
        pause_s = self._post("commit", commit)["pause_s"]
        return Update((began, ended), staged["receive_s"], pause_s, sent_s, received_s)


@dataclass(frozen=True)
class Update:
    span: tuple[float, float]  # from the order to receive to the verified version
    receive_s: float
    pause_s: float
    sent_s: float  # processor time of the trainer's end
    received_s: float  # and of the sampler's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=4.0)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=8)
    args = parser.parse_args()
    model = small_model()
    weights = weights_of(model)
    options = SampleOptions(dtype="float32", max_model_len=1024, max_num_seqs=32, kv_cache_mib=256)
    transfers = replace(WEIGHTS, bucket_mib=args.bucket_mib, group_s=LIMIT_S, update_s=LIMIT_S)
    processes = [Process(partial(Trainer, weights)), Process(Burner), Process(Burner)]
    try:
        with tempfile.TemporaryDirectory() as folder, sampler(Path(folder), options, model, transfers) as lab:
            measure(lab, processes, weights, args)
    finally:
        for process in processes:
            process.end()


def measure(lab: Lab, processes: Sequence[Process], weights: Weights, args: argparse.Namespace) -> None:
    trainer, *burners = processes
    updates = Updates(lab, trainer, weights, args.bucket_mib * 2**20)
    updates.update()  # the first version, and the first use of everything
    load = Load(lab)
    asking = load.start(args.sequences)
    rates: dict[str, list[float]] = {"alone": [], "transfer": [], "burnt": []}
    done: list[Update] = []
    print(f"{'tokens/s':10}" + "".join(f"{name:>10}" for name in rates) + "   of a core: sender, receiver; burnt")
    for number in range(-1, args.rounds):  # the first one is not counted
        time.sleep(args.window_s)
        now = time.monotonic()
        alone = load.rate([(now - args.window_s, now)])
        found = [updates.update()]
        while time.monotonic() < now + args.window_s:
            found.append(updates.update())
        length_s = sum(end - begin for begin, end in (one.span for one in found))
        shares = sum(one.sent_s for one in found) / length_s, sum(one.received_s for one in found) / length_s
        began = time.monotonic()
        for burner, share in zip(burners, shares, strict=True):
            burner.tell("burn", share, length_s)
        burnt_s = [burner.spent_s() for burner in burners]
        ended = time.monotonic()
        assert not asking.done(), asking.exception()
        if number < 0:
            continue
        done += found
        for name, rate in zip(rates, (alone, load.rate([one.span for one in found]), load.rate([(began, ended)])), strict=True):
            rates[name].append(rate)
        burnt = ", ".join(f"{spent_s / (ended - began):.2f}" for spent_s in burnt_s)
        row = "".join(f"{measured[-1]:10.0f}" for measured in rates.values())
        print(f"{number + 1:<10}{row}   {shares[0]:.2f}, {shares[1]:.2f}; {burnt}", flush=True)
    asking.cancel()
    ratios = [transfer / burnt for transfer, burnt in zip(rates["transfer"], rates["burnt"], strict=True)]
    print(f"transfer to burnt    {spread(ratios)} of {len(ratios)} rounds")
    pauses = [one.pause_s / one.receive_s for one in done]
    print(f"pause to transfer    {spread(pauses)} of {len(pauses)} updates")
    print(f"pause                {spread([1e3 * one.pause_s for one in done], 1)} ms")
    size_mb = sum(tensor.nbytes for tensor in weights.values()) / 1e6
    print(f"transfer             {spread([1e3 * one.receive_s for one in done], 0)} ms, {size_mb:.0f} MB")


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
