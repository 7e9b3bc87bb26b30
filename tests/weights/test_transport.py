"""Real processes over gloo on this machine's loop-back interface."""

import multiprocessing
import re
import time
from multiprocessing.connection import Connection

import pytest
import torch

from prl.weights.digest import digest
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec
from prl.weights.transport import SamplerEnd, TrainerEnd, TransportError, spec_of

HOST = "127.0.0.1"
OPTIONS = WeightsOptions(bucket_mib=1, group_s=60.0, update_s=20.0)
SHORT = WeightsOptions(bucket_mib=1, group_s=1.0, update_s=1.0)


def version(seed: int) -> dict[str, torch.Tensor]:
    """2.6 MiB in three buckets, of several dtypes, one tensor not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(700, 600, generator=generator),
        "empty": torch.empty(0, 3),
        "turned": torch.randn(300, 200, generator=generator).T,
        "half": torch.randn(333, generator=generator).bfloat16(),
        "bytes": torch.randint(0, 255, (600_001,), generator=generator, dtype=torch.uint8),
    }


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [spec_of(name, tensor) for name, tensor in tensors.items()]


def sampler(port: int, rank: int, pipe: Connection, versions: int) -> None:
    end = SamplerEnd(HOST, port, rank, 3, 1, 60.0)
    for _ in range(versions):
        tensors = end.receive(specs_of(version(0)), 2**20, 20.0)
        pipe.send((digest(tensors), {name: tensor.tolist() for name, tensor in tensors.items() if name == "half"}))
    try:
        end.receive(specs_of(version(0)), 2**20, 1.0)
    except TransportError as error:
        pipe.send(str(error))
    pipe.recv()  # the group lives until the test is through


def test_two_samplers_get_what_the_trainer_sends():
    spawn = multiprocessing.get_context("spawn")
    trainer = TrainerEnd(HOST, OPTIONS)
    pipes, processes = [], []
    for rank in (1, 2):
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=sampler, args=(trainer.master_port, rank, theirs, 2), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    trainer.join(1, 3)
    for seed in (1, 2):
        sent = version(seed)
        report = trainer.send(sent)
        assert report.bytes == 700 * 600 * 4 + 300 * 200 * 4 + 333 * 2 + 600_001
        assert report.digest == digest(sent)
        for pipe in pipes:
            assert pipe.poll(20)
            assert pipe.recv() == (report.digest, {"half": sent["half"].tolist()})
    for rank, pipe in enumerate(pipes, 1):  # the trainer sends no third one
        assert pipe.poll(20)
        words = rf"weight group, epoch 1, rank {rank} of 3: waited \d\.\d s for bucket 1 of 3 from the trainer: .*"
        assert re.fullmatch(words, pipe.recv())
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join(20)
        assert process.exitcode == 0
    with pytest.raises(TransportError, match=r"bucket \d of 3 to be taken by the samplers"):  # they are gone
        trainer.send(version(3))
    with pytest.raises(TransportError, match="no transfer group: join an epoch"):
        trainer.send(version(3))


def test_a_missing_sampler_is_named():
    trainer = TrainerEnd(HOST, SHORT)
    began = time.monotonic()
    with pytest.raises(
        TransportError, match="epoch 4, rank 0 of 3: waited 1 s for sampler worker of rank 1, sampler worker of rank 2"
    ):
        trainer.join(4, 3)
    assert time.monotonic() - began < 5


def test_a_missing_trainer_is_named():
    trainer = TrainerEnd(HOST, SHORT)  # its store answers, but it does not join
    with pytest.raises(TransportError, match="epoch 2, rank 1 of 2: waited 1 s for the trainer"):
        SamplerEnd(HOST, trainer.master_port, 1, 2, 2, 1.0)


def test_a_missing_store_is_named():
    with pytest.raises(TransportError, match=r"epoch 2, rank 1: the trainer's store at 127.0.0.1:9 did not answer within 1 s"):
        SamplerEnd(HOST, 9, 1, 2, 2, 1.0)
