"""What a killed child cannot remove itself is removed for it: shared memory of its whole group, and nothing of others, nor what
was not made there by it: files that it has mapped, too, of before its start or in a folder."""

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from prl.orchestrator.children import ChildPlan, end_child, end_rest, note_segments, start_child

CHILD = """
import mmap, os, time

def share(name):
    with open("/dev/shm/" + name, "rb+" if name.endswith("found") else "wb+") as file:
        if not name.endswith("found"):
            file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)

own = share(f"prl-test-{os.getppid()}-own")
read = [share(f"prl-test-{os.getppid()}-{name}") for name in ("model/weights", "found")]
if os.fork() == 0:
    workers = share(f"prl-test-{os.getppid()}-worker")
    print("lives", flush=True)
    time.sleep(600)
gone = share("prl-test-gone")
os.unlink("/dev/shm/prl-test-gone")
print("lives", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["ended", "killed before"])
def test_shared_memory_of_a_child_and_its_workers_goes_with_them(tmp_path, how):
    (tmp_path / "prl").mkdir()
    (tmp_path / "prl/__init__.py").touch()
    (tmp_path / "prl/sampler.py").write_text(CHILD)
    others, model, found = (Path(f"/dev/shm/prl-test-{os.getpid()}-{name}") for name in ("other", "model", "found"))
    model.mkdir()
    others.touch()
    found.write_bytes(bytes(4096))
    time.sleep(0.1)  # file systems keep a coarse clock

    async def main():
        plan = ChildPlan("sampler", 0, 0, (), {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"})
        child = await start_child(plan, {}, tmp_path)
        async with asyncio.timeout(20):
            while child.log.read_text().count("lives") < 2:  # noqa: ASYNC110 (written by another process)
                await asyncio.sleep(0.02)
        shared = [others.with_name(f"prl-test-{pid}") for pid in (f"{os.getpid()}-own", f"{child.process.pid}-worker")]
        assert all(path.exists() for path in shared)
        if how == "ended":
            await end_child(child, 5.0)
        else:
            note_segments([child])
            os.killpg(child.process.pid, signal.SIGKILL)  # nobody is left whose memory could be looked at
            await child.process.wait()
            end_rest(child)
        assert not any(path.exists() for path in shared)

    try:
        asyncio.run(main())
        assert others.exists()
        assert found.exists()
        assert (model / "weights").exists()
    finally:
        others.unlink()
        found.unlink()
        shutil.rmtree(model)
