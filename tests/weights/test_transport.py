"""Real processes over gloo on this machine's loop-back interface."""

import builtins
import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch

from prl.weights.delta import DeltaError
from prl.weights.digest import digest
from prl.weights.group import TransportError
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec
from prl.weights.transport import SamplerEnd, SendReport, TrainerEnd, Whole, spec_of

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
    """The second one takes them tensor by tensor."""
    end = SamplerEnd(HOST, port, rank, 3, 1, 60.0)
    specs = specs_of(version(0))
    for _ in range(versions):
        if rank == 1:
            tensors = end.receive(specs, 2**20, 20.0)
        else:
            tensors = {spec.name: tensor for spec, tensor in end.arriving(specs, 2**20, 20.0)}
            assert list(tensors) == [spec.name for spec in specs if spec.elements]
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


def delta_sampler(port: int, rank: int, pipe: Connection) -> None:
    """Told by the pipe: to join an epoch, to receive a version and say its bits, or to forget what it holds."""
    end, held = None, None
    while (command := pipe.recv()) != "end":
        match command:
            case int():
                end, held = SamplerEnd(HOST, port, rank, 3, command, 60.0), None
                pipe.send("joined")
            case "forget":
                held = None
            case "receive":
                assert end is not None
                try:
                    tensors = end.receive(specs_of(version(0)), 2**20, 20.0, deltas=True, held=held)
                except DeltaError as error:
                    held = None
                    end.close()
                    pipe.send(str(error))
                else:
                    held = Whole(tensors, digest(tensors))
                    pipe.send({name: bits(tensor) for name, tensor in tensors.items()})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def nudged(tensors: dict[str, torch.Tensor], every: int) -> dict[str, torch.Tensor]:
    """The lowest byte of one value in so many is another, of each tensor."""
    result = {}
    for name, tensor in tensors.items():
        flat = tensor.contiguous().reshape(-1).clone()
        if len(flat):
            flat.view(torch.uint8).view(len(flat), -1)[::every, 0] ^= 1
        result[name] = flat.reshape(tensor.shape)
    return result


def test_deltas_bring_what_dense_versions_would():
    """Over versions that were skipped, unchanged, sent twice, sent in full, and over a new epoch; then to samplers that do not
    hold what the trainer thinks it does."""
    spawn = multiprocessing.get_context("spawn")
    trainer = TrainerEnd(HOST, replace(OPTIONS, delta=True))
    pipes, processes = [], []
    for rank in (1, 2):
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=delta_sampler, args=(trainer.master_port, rank, theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)

    def tell(command: int | str) -> None:
        for pipe in pipes:
            pipe.send(command)

    def answers() -> list[object]:
        assert all(pipe.poll(30) for pipe in pipes)
        return [pipe.recv() for pipe in pipes]

    def join(epoch: int) -> None:
        tell(epoch)
        trainer.join(epoch, 3)
        assert answers() == ["joined", "joined"]

    def send(tensors: dict[str, torch.Tensor], held: int | None) -> SendReport:
        tell("receive")
        report = trainer.send(tensors, held)
        assert report.digest == digest(tensors)
        assert answers() == [{name: bits(tensor) for name, tensor in tensors.items()}] * 2
        return report

    headers = 3 * 40
    whole = 700 * 600 * 4 + 300 * 200 * 4 + 333 * 2 + 600_001 + headers
    first, second = version(1), nudged(version(1), 50)
    third = nudged(nudged(second, 40), 7)  # the trainer skips the one between
    join(1)
    report = send(first, None)
    assert (report.bytes, report.changed_share) == (whole, None)
    report = send(second, report.digest)
    assert report.changed_share == pytest.approx(1 / 50, rel=0.5)  # a bucket of bytes and wider values counts bytes
    assert report.bytes < 0.08 * whole
    again = send(second, report.digest)
    assert (again.bytes, again.changed_share, again.digest) == (headers, 0.0, report.digest)
    report = send(third, again.digest)
    assert report.changed_share is not None
    assert report.changed_share > 1 / 15
    report = send(first, None)  # somebody may not hold the third one
    assert (report.bytes, report.changed_share) == (whole, None)
    report = send(second, report.digest ^ 1)  # they hold something else
    assert (report.bytes, report.changed_share) == (whole, None)
    everything = send(version(2), report.digest)
    assert everything.changed_share == pytest.approx(1, abs=0.3)
    assert everything.bytes <= whole
    join(2)
    report = send(version(2), everything.digest)
    assert (report.bytes, report.changed_share) == (whole, None)
    tell("forget")
    tell("receive")
    with contextlib.suppress(TransportError):  # it may all be on its way before they leave
        trainer.send(nudged(version(2), 50), report.digest)
    words = (
        f"a delta to the weights with digest {report.digest}, but nothing to apply it to is held: a dense version has to come"
    )
    assert all(str(answer).startswith(words) for answer in answers())
    join(3)
    assert send(first, report.digest).changed_share is None
    tell("end")
    for process in processes:
        process.join(20)
        assert process.exitcode == 0


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


class Lingers:
    """Goes while the interpreter is torn down: says so then, and takes its time, in which other threads may come back."""

    def __init__(self, pipe: Connection) -> None:
        self.write, self.sleep, self.pipe = os.write, time.sleep, pipe

    def __del__(self) -> None:
        self.write(self.pipe.fileno(), b"!")
        self.sleep(3.0)


def survivor(port: int, pipe: Connection) -> None:
    """Rank 2 of the first group, told to leave it, then rank 1 of the second."""
    builtins.lingers = Lingers(pipe)  # type: ignore[attr-defined]  # which go last
    left = threading.Event()
    end = SamplerEnd(HOST, port, 2, 3, 1, 60.0, left=left)
    pipe.send("built")
    threading.Thread(target=lambda: pipe.recv() and left.set(), daemon=True).start()
    began = time.monotonic()
    try:
        for _ in range(2):  # it may be that all of the first version has come here
            end.receive(specs_of(large(0)), 2**20, 20.0)
    except TransportError as error:
        pipe.send((str(error), time.monotonic() - began))
    end.close()
    tensors = SamplerEnd(HOST, port, 1, 2, 2, 60.0).receive(specs_of(large(0)), 2**20, 20.0)
    pipe.send(digest(tensors))
    pipe.recv()


def bystander(port: int, pipe: Connection) -> None:
    end = SamplerEnd(HOST, port, 1, 3, 1, 60.0)
    pipe.send("built")
    end.receive(specs_of(large(0)), 2**20, 60.0)


def large(seed: int) -> dict[str, torch.Tensor]:
    """More than the sockets between two processes hold."""
    return {"large": torch.full((6 * 2**20,), float(seed))}


def send_for_ever(trainer: TrainerEnd) -> None:
    for seed in itertools.count():
        trainer.send(large(seed))


def test_everyone_leaves_a_group_of_which_one_stands_still_and_builds_another():
    spawn = multiprocessing.get_context("spawn")
    trainer = TrainerEnd(HOST, OPTIONS)
    pipes, processes = [], []
    for work in (bystander, survivor):
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(trainer.master_port, theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    trainer.join(1, 3)
    for pipe in pipes:
        assert pipe.poll(20)
        assert pipe.recv() == "built"
    os.kill(processes[0].pid, signal.SIGSTOP)
    try:
        trainer.leave(7)  # no group of ours
        timer = threading.Timer(0.5, trainer.leave, (1,))
        timer.start()
        began = time.monotonic()
        with pytest.raises(TransportError, match="this rank was told to leave"):
            send_for_ever(trainer)
        assert time.monotonic() - began < 5  # of the 20 s that the transfer may take
        pipes[1].send("leave")
        assert pipes[1].poll(5)
        words, _ = pipes[1].recv()
        assert "this rank was told to leave" in words
        began = time.monotonic()
        trainer.join(2, 2)
        sent = trainer.send(large(5)).digest
        assert pipes[1].poll(10)
        assert pipes[1].recv() == sent == digest(large(5))
        assert time.monotonic() - began < 10
        pipes[1].send("end")
        assert pipes[1].poll(20)
        assert os.read(pipes[1].fileno(), 1) == b"!"
        processes[0].kill()  # and what is left behind of the first group fails in both others
        processes[1].join(20)
        assert processes[1].exitcode == 0
    finally:
        processes[0].kill()


def test_who_waits_for_others_to_come_can_be_told_to_leave():
    trainer = TrainerEnd(HOST, OPTIONS)
    timer = threading.Timer(0.3, trainer.leave, (4,))
    timer.start()
    began = time.monotonic()
    with pytest.raises(TransportError, match="epoch 4, rank 0 of 2: it was left while it was built"):
        trainer.join(4, 2)
    assert time.monotonic() - began < 5
