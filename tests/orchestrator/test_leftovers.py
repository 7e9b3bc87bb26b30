"""What a killed child cannot remove itself is removed for it: shared memory of its whole group, and nothing of others."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from prl.orchestrator.children import ChildPlan, end_child, end_rest, note_segments, start_child

CHILD = """
import mmap, os, time

def share(name):
    with open("/dev/shm/" + name, "wb+") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)

own = share(f"prl-test-{os.getppid()}-own")
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
    others = Path(f"/dev/shm/prl-test-{os.getpid()}-other")
    others.touch()

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
    finally:
        others.unlink()
