"""A full filesystem is told with the path and what to do, whoever meets it and however it is reported."""

import asyncio
import errno
import os
from pathlib import Path

import pytest
from failing_child import reported

from prl.control.server import Bell
from prl.metrics.events import MetricsWriter
from prl.orchestrator.causes import Causes
from prl.runfolder.publish import StorageFull, in_words

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_words_of_errors():
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/runs/a/x")
    assert in_words(FULL, "/runs/a").startswith("/runs/a: no space is left. What was made durable before is safe. Free some")
    assert in_words(FULL, "/runs/a").endswith(
        "prl-submit --resume RUN, where there is a checkpoint. OSError: [Errno 28] No space left on device"
    )
    assert in_words(FULL).startswith("no space is left. What")
    assert in_words(quota, Path("/runs/a")).startswith("/runs/a/x: the quota is used up. What was")
    told = StorageFull(Path("/runs/a/y"), FULL)
    assert in_words(told, "/runs/a") == f"StorageFull: {told}"
    assert in_words(RuntimeError(f"/rollouts refused: {told}"), "/runs/a") == f"RuntimeError: /rollouts refused: {told}"
    # what libraries make of it
    text = ValueError("I/O error: No space left on device (os error 28)")
    assert in_words(text, "/runs/a").startswith("/runs/a: no space is left.")
    assert in_words(text, "/runs/a").endswith(f"ValueError: {text}")
    wrapped = KeyError("a checkpoint")
    wrapped.__cause__ = quota
    assert in_words(wrapped, "/runs/a").startswith("/runs/a/x: the quota is used up.")
    assert in_words(PermissionError(errno.EACCES, "Permission denied", "/x"), "/runs/a") == (
        "PermissionError: [Errno 13] Permission denied: '/x'"
    )


def test_the_orchestrator_tells_it():
    async def main():
        causes = Causes(Bell())
        causes.fault(FULL, ", the ledger")
        assert causes.found[0].words.startswith("orchestrator, the ledger: no space is left. What was made durable")

    asyncio.run(main())


def test_metrics_name_their_file(tmp_path):
    writer = MetricsWriter(tmp_path, "actor", 0, 1, flush_s=1000.0)
    writer.path.symlink_to("/dev/full")
    writer.write({"a": 1.0})
    with pytest.raises(StorageFull, match=r"actor-0\.jsonl"):
        writer.flush()
    writer.path.unlink()
    writer.close()


@pytest.mark.parametrize("kind", ["run_child", "run_threaded_child"])
def test_a_child_whose_log_takes_nothing_still_reports_it(tmp_path, kind):
    error, trace = reported(tmp_path, kind, "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))", Path("/dev/full"))
    assert error.startswith(f"{tmp_path}/run: no space is left. What was made durable before is safe.")
    assert "OSError: [Errno 28]" in trace


def test_what_ends_a_threaded_child_is_reported_also_where_it_is_no_exception(tmp_path):
    error, _ = reported(tmp_path, "run_threaded_child", "BaseException('torch has some')", Path("/dev/full"))
    assert error == "BaseException: torch has some"
