#!/usr/bin/env python3
"""Checks on a node with GPUs what cannot be checked without: run it once on a cluster before the first real run.

    python tools/gpu_check.py                 needs 2 GPUs or more, and `pip install .[gpu]`

1. versions of torch, CUDA, NCCL, vLLM and Megatron, and the GPUs;
2. a transfer of 1 GiB of weights over NCCL from one GPU to another with prl's own transport: digests equal, GB/s printed;
3. the quickstart with its trainer on one GPU and its sampler on another: five steps, versions verified and committed.

Prints what it saw and ends with 1 where something is wrong. It was written without a GPU and has not run on one yet.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

from prl.weights.digest import digest
from prl.weights.options import WeightsOptions
from prl.weights.plan import TensorSpec
from prl.weights.transport import SamplerEnd, TrainerEnd, spec_of

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
TENSORS, TENSOR_BYTES = 8, 128 * 2**20
RECEIVE_S = 120.0
RUN_S = 900.0


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print_versions()
    if torch.cuda.device_count() < 2:
        print(f"gpu_check: {torch.cuda.device_count()} GPUs are visible here, 2 are needed", file=sys.stderr)
        return 1
    failed = [name for name, check in (("transfer", check_transfer), ("quickstart", check_quickstart)) if not check()]
    print(f"gpu_check: {'failed: ' + ', '.join(failed) if failed else 'all is well'}")
    return 1 if failed else 0


def print_versions() -> None:
    for package in ("torch", "vllm", "megatron-core", "transformers"):
        try:
            print(f"{package:<14} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package:<14} not installed")
    print(f"{'CUDA':<14} {torch.version.cuda}")
    if torch.cuda.is_available():
        print(f"{'NCCL':<14} {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for number in range(torch.cuda.device_count()):
        print(f"{'GPU ' + str(number):<14} {torch.cuda.get_device_name(number)}")


def check_transfer() -> bool:
    """Send from GPU 0, receive on GPU 1 in another process, compare digests."""
    options = WeightsOptions()
    torch.cuda.set_device(0)
    generator = torch.Generator(device="cuda:0").manual_seed(1)
    shape = (TENSOR_BYTES // 2,)
    tensors = {
        f"tensor_{k}": torch.randn(shape, dtype=torch.bfloat16, device="cuda:0", generator=generator) for k in range(TENSORS)
    }
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    end = TrainerEnd(HOST, options, "cuda:0")
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    arguments = (end.master_port, specs, options.bucket_mib * 2**20, options.group_s, answers)
    receiver = context.Process(target=receive, args=arguments)
    receiver.start()
    end.join(1, 2)
    report = end.send(tensors)
    receiver.join(RECEIVE_S)
    if receiver.exitcode != 0:
        print(f"transfer: the receiver ended with {receiver.exitcode}")
        return False
    received = answers.get()
    print(f"transfer: {report.bytes / 2**30:.2f} GiB in {report.send_s:.3f} s, {report.bytes / report.send_s / 1e9:.1f} GB/s")
    print(f"transfer: digests {report.digest} sent, {received} received")
    return bool(received == report.digest)


def receive(
    port: int, specs: list[TensorSpec], bucket_bytes: int, timeout_s: float, answers: "multiprocessing.SimpleQueue"
) -> None:
    torch.cuda.set_device(1)
    end = SamplerEnd(HOST, port, 1, 2, 1, timeout_s, "cuda:1")
    answers.put(digest(end.receive(specs, bucket_bytes)))


def check_quickstart() -> bool:
    """Five steps with one trainer rank and one sampler, each on a GPU of its own."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            f"run.folder={folder}/run",
            "run.steps=5",
            "run.stop_at_reward=null",
            "run.evaluate_every_steps=0",
            "cluster.gpus_per_node=2",
            "train.tensor_parallel=1",
            "sample.gpu_memory_utilization=0.5",
            "sample.enforce_eager=false",
        )
        command = [sys.executable, "-m", "prl.cli.submit", str(ROOT / "configs" / "quickstart.yaml"), "--set", *settings]
        code = subprocess.run(command, timeout=RUN_S, check=False, cwd=ROOT).returncode
        print(f"quickstart: exit code {code}")
        return code == 0


if __name__ == "__main__":
    sys.exit(main())
