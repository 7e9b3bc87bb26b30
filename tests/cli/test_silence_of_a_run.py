"""Who follows a run is told when nothing is heard of it any more."""

import io
import json

import pytest

from prl.cli.progress import follow
from prl.config.load import replace
from prl.config.schema import Config
from prl.metrics import names
from prl.metrics.events import MetricsWriter
from prl.runfolder.paths import RunFolder


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_run_that_is_not_heard_of_is_told_once(tmp_path, stream):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    config, now = replace(Config(), run={"steps": 100}, control={"lost_after_s": 8.0}), [0.0]
    with MetricsWriter(run.metrics, "agent", 0, 1) as agent, MetricsWriter(run.metrics, "sampler", 0, 1) as sampler:

        def ended(_wait_s):
            """Seconds 0-119: in the queue, alive from 50 on, silent from 60 on while samplers still speak, alive again at 90;
            from 100 on the attempt has ended, and the job waits in the queue again."""
            now[0] += 1.0
            if now[0] == 100:
                run.exit(1).write_text(json.dumps({"outcome": "left", "cause": "", "code": 75}))
            if 50 <= now[0] < 60 or 90 <= now[0] < 100:
                agent.write({}, kind=names.USAGE)
                agent.flush()
            sampler.write({"sampler/x": 1.0})
            sampler.flush()
            return now[0] >= 120

        follow(run, 1, config, ended, stream, clock=lambda: now[0])
    words = "nothing was heard of the run's orchestrator for 8 s: it may be frozen, or its metrics do not get here; see "
    assert stream.getvalue().count("nothing was heard") == 1
    assert f"{words}{run.logs(1)}" in stream.getvalue()
