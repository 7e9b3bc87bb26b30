"""A job that Slurm has put into the queue again begins the next attempt by itself."""

import json

from prl.cluster.claims import begin_requeued, next_attempt
from prl.runfolder.paths import RunFolder


def test_it_leaves_what_a_submission_leaves_of_an_attempt(tmp_path):
    run = RunFolder(tmp_path)
    run.attempt(2).mkdir()
    (run.attempt(2) / "config.yaml").write_text("run: {name: one}\n")
    (run.attempt(2) / "submission.json").write_text(json.dumps({"kind": "het", "job_id": "7", "host": "login"}))
    run.latest.symlink_to("attempt_002")
    for restarts in (1, 2):
        attempt = 2 + restarts
        assert next_attempt(run) == attempt
        run.logs(attempt).mkdir(parents=True)  # which any node may be the first to make
        begin_requeued(run, attempt, restarts)
        assert json.loads((run.attempt(attempt) / "submission.json").read_text())["job_id"] == "7"
        assert (run.attempt(attempt) / "config.yaml").read_text() == "run: {name: one}\n"
        assert run.latest.readlink().name == run.attempt(attempt).name
