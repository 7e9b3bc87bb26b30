import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from unprivileged import unprivileged

from prl.cli.report import main
from prl.flow.events import LedgerEvent
from prl.flow.ids import RolloutId
from prl.flow.versions import Version
from prl.metrics.events import MetricsWriter
from prl.report.read import ReportError, read_run
from prl.report.render import render, sparkline
from prl.report.summary import RUNNING_FOR_S, as_json, summarize
from prl.runfolder.manifest import newest_manifest
from prl.runfolder.paths import RunFolder
from prl.runfolder.publish import publish_json
from prl.streams.ledger import LedgerWriter

T0 = 1_800_000_000.0


def new_run(tmp_path, attempts=1):
    run = RunFolder(tmp_path / "demo")
    run.create()
    run.config.write_text("run: {name: demo, steps: 8, mode: pipeline, max_lag: 4}\nkey_of_another_version: 1\n")
    for number in range(1, attempts + 1):
        run.logs(number).mkdir(parents=True)
    return run


def write_step(writer, step, *, time, wait_s=1.0, lag=0, reward=None):
    values = {
        "train/loss": 0.5,
        "train/tokens": 100,
        "train/step_s": 4.0,
        "train/wait_s": wait_s,
        "train/send_s": 0.5,
        "train/lag_mean": lag,
        "train/lag_max": lag,
        "data/reward_mean": step / 10 if reward is None else reward,
        "data/rollouts": 16,
        "data/mixed_version_share": 0.25,
    }
    writer.write(values, step=step, kind="step", time=time)
    weights = {"pause_s": step / 500, "receive_s": 0.2, "transfer_s": step / 10, "passed_over": float(step == 3)}
    weights["bytes"] = 1e6 * step
    if step > 1:  # the first version is sent in full
        weights["changed_share"] = step / 100
    values = {f"weights/{name}": value for name, value in weights.items()}
    writer.write(values, step=step, kind="weights", time=time)


def end(run, number, outcome="done", cause="all 8 steps trained", role=None, code=0, steps=4):
    facts = {"outcome": outcome, "cause": cause, "role": role, "code": code, "steps": steps}
    publish_json(run.exit(number), {**facts, "started": T0, "ended": T0 + 100})


def test_a_finished_run(tmp_path):
    run = new_run(tmp_path)
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        for name, after_s in (("starting", 0), ("seeding", 20), ("running", 23.5)):
            writer.write({}, kind="phase", labels={"name": name}, time=T0 + after_s)
        for step in (1, 2, 3, 4):
            write_step(writer, step, time=T0 + 24 + 4 * step, lag=step % 2)
        for step, reward in ((0, 0.06), (2, 0.4), (4, 0.9)):
            writer.write({"eval/reward_mean": reward}, step=step, kind="evaluation", labels={"domain": "digits"}, time=T0)
        for index, cpu_s in ((0, 7.0), (1, 8.0)):
            labels = {"role": "trainer", "process": f"trainer {index}"}
            writer.write({"usage/cpu_s": cpu_s, "usage/max_rss_bytes": 1e9 + index}, kind="usage", labels=labels)
    end(run, 1)
    summary = summarize(read_run(run.path), now=T0 + 10_000)

    assert (summary.outcome, summary.code, summary.steps, summary.steps_planned) == ("done", 0, 4, 8)
    assert summary.duration_s == 100
    assert summary.start_up == [("starting", 0.0), ("seeding", 20.0), ("running", 23.5)]
    assert summary.rewards == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert summary.evaluations == {"digits": [(0, 0.06), (2, 0.4), (4, 0.9)]}
    assert (summary.lag_mean, summary.lag_max) == (0.5, 1.0)
    assert summary.trained_tokens_per_s == 400 / 16
    assert summary.rollouts_per_s == 64 / 16
    shares = summary.trainer_time
    assert (shares.waiting, shares.sending, shares.computing) == (0.25, 0.125, 0.625)
    assert (summary.pause_s.p50, summary.pause_s.max) == (pytest.approx(0.005), 0.008)
    assert summary.pause_s.p95 == pytest.approx(0.0077)  # 0.95 of the way over 4 values: between the third and the fourth
    (trainer,) = summary.usage
    assert (trainer.processes, trainer.cpu_s, trainer.max_rss_bytes) == (2, 15.0, 1e9 + 1)
    assert (summary.stall_s.p50, summary.stall_s.max) == (0.5, 0.5)
    assert (summary.transfer_s.p50, summary.transfer_s.max) == (pytest.approx(0.25), 0.4)
    assert summary.passed_over == 1
    assert summary.gap_s is None

    text = render(summary)
    assert "demo: done (exit code 0)" in text
    assert "starting at 0.0 s, seeding at 20.0 s, running at 23.5 s" in text
    assert "best      0.900 at step 4" in text
    assert "computing 62.5 %, waiting for data 25 %, sending weights 12.5 %" in text
    assert "pause       p50 5.0 ms, p95 7.7 ms, max 8.0 ms" in text
    assert "stall       p50 500.0 ms" in text
    assert "transfer    p50 250.0 ms" in text
    assert "passed over 1 of the versions for newer ones" in text
    assert "sent        p50 2.5 MB, max 4.0 MB a version; 3 % of the values had changed (p50)" in text
    assert str(run.path.resolve()) in text
    assert json.loads(json.dumps(as_json(summary), allow_nan=False))["lag_mean"] == 0.5


def test_a_resumed_run_counts_each_step_once_and_lists_its_attempts(tmp_path):
    run = new_run(tmp_path, attempts=2)
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        for step in (1, 2, 3):
            write_step(writer, step, time=T0 + step, reward=0.1)
    end(run, 1, "failed", "trainer 0 was ended by SIGKILL", "trainer", 1, steps=3)
    with MetricsWriter(run.metrics, "orchestrator", 0, 2) as writer:
        for step in (3, 4):
            write_step(writer, step, time=T0 + 10 + step, reward=0.7)
    end(run, 2)
    record = read_run(run.path)
    assert record.steps.step.tolist() == [1, 2, 3, 4]
    assert record.steps.attempt.tolist() == [1, 1, 2, 2]
    summary = summarize(record, T0)
    assert [reward for _, reward in summary.rewards] == [0.1, 0.1, 0.7, 0.7]
    text = render(summary)
    assert "attempt 1   failed: trainer 0 was ended by SIGKILL" in text
    assert "attempt 2   done" in text


def test_a_run_that_goes_on_and_one_that_was_lost(tmp_path):
    run = new_run(tmp_path)
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        write_step(writer, 1, time=T0)
    with open(run.metrics / "orchestrator-0.jsonl", "a") as file:
        file.write('{"time": 18')  # being written
    record = read_run(run.path)
    assert summarize(record, T0 + 3).outcome == "running"
    lost = summarize(record, T0 + RUNNING_FOR_S + 1)
    assert lost.outcome == "lost"
    assert "killed" in lost.cause


def test_a_run_that_failed_at_its_start(tmp_path):
    run = new_run(tmp_path)
    end(run, 1, "failed", "waited 300 s for these processes to join: sampler 0", "sampler", 1, steps=0)
    text = render(summarize(read_run(run.path), T0))
    assert "demo: failed (exit code 1)" in text
    assert "waited 300 s for these processes to join: sampler 0 [sampler]" in text
    assert "steps       0 of 8" in text


def test_a_run_that_was_submitted_only(tmp_path):
    run = new_run(tmp_path, attempts=0)
    summary = summarize(read_run(run.path), T0)
    assert summary.outcome == "not started"
    assert as_json(summary)["lag_mean"] is None
    assert "no attempt has begun" in render(summary)


def test_discards_are_counted_by_reason(tmp_path):
    run = new_run(tmp_path)

    def event(number, kind, reason=""):
        return LedgerEvent(RolloutId(0, "digits/1", 1, number, 0), kind, Version(0, 0), -1, reason)

    ledger = LedgerWriter(run.ledger(1))
    ledger.append([event(k, "issued") for k in range(4)])
    ledger.append([event(0, "discarded", "too old"), event(1, "discarded", "late"), event(2, "discarded", "late")])
    ledger.close()
    assert dict(read_run(run.path).discards) == {"late": 2, "too old": 1}
    assert "2  late" in render(summarize(read_run(run.path), T0))


def test_a_damaged_ledger_is_a_note(tmp_path):
    run = new_run(tmp_path)
    with LedgerWriter(run.ledger(1)) as ledger:
        for number in range(3):
            ledger.append([LedgerEvent(RolloutId(0, "digits/1", number, 0, 0), "issued", Version(0, 0), -1, "")])
    data = bytearray(ledger.path.read_bytes())
    data[40] ^= 1
    ledger.path.write_bytes(data)
    text = render(summarize(read_run(run.path), T0))
    assert "the ledger cannot be read" in text
    assert str(ledger.path.resolve()) in text


def test_the_lag_histogram_and_the_folder_sizes(tmp_path):
    run = new_run(tmp_path)
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        writer.write({"train/lag_0": 30, "train/lag_2": 10}, step=1, kind="step")
        writer.write({"train/lag_0": 20, "train/lag_1": 40, "train/lag_mean": 0.6}, step=2, kind="step")
    (run.steps / "a.arrow").write_bytes(b"x" * 1500)
    (run.steps / "b.arrow").write_bytes(b"x" * 500)
    summary = summarize(read_run(run.path), T0)
    assert summary.lag_shares == {0: 0.5, 1: 0.4, 2: 0.1}
    assert summary.files["streams/steps"] == (2, 2000)
    assert "0: 50 %   1: 40 %   2: 10 %" in render(summary)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("x")])
def test_what_is_no_run_is_refused_in_words(tmp_path, capsys, make):
    make(tmp_path / "other")
    with pytest.raises(ReportError, match="run"):
        read_run(tmp_path / "other")
    assert main([str(tmp_path / "other")]) == 1
    assert str(tmp_path / "other") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run: 3", "config.yaml: expected sections such as run: and model:, each with keys and values"),
        ("run: [1]", "config.yaml: expected sections such as run: and model:, each with keys and values"),
        (f"run: {{steps: {'9' * 5000}}}", "config.yaml: not a configuration: a value cannot be read: Exceeds the"),
    ],
)
def test_a_configuration_that_is_none_is_told_in_words(tmp_path, capsys, text, words):
    (tmp_path / "streams/ledger").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(text)
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path}/{words}" in capsys.readouterr().err
    assert main([str(tmp_path), "--audit"]) == 1
    assert capsys.readouterr().err.startswith("prl-report: error: ")


def test_what_is_no_yaml_is_told_in_one_line(tmp_path, capsys):
    (tmp_path / "streams/ledger").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("run: [")
    for options in ([], ["--audit"]):
        assert main([str(tmp_path), *options]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"prl-report: error: {tmp_path}/config.yaml: ")
        assert line.count("config.yaml") == 1
        assert "line 2, column 1: is no YAML" in line


@pytest.mark.parametrize(
    ("folder", "options"),
    [("metrics", []), ("streams/ledger", []), ("streams/ledger", ["--audit"]), (".", []), (".", ["--audit"])],
)
def test_a_folder_that_may_not_be_read_is_told_and_not_taken_for_empty(tmp_path, capsys, folder, options):
    run = new_run(tmp_path)
    run.config.write_text("run: {name: demo}\n")
    end(run, 1)
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(0o755)
    locked = run.path / folder
    locked.chmod(0)
    with unprivileged(tmp_path):
        assert main([str(run.path), *options]) == 1
    said = capsys.readouterr().err
    assert "Permission denied" in said
    assert str(locked) in said


def test_the_command_prints_text_and_json(tmp_path):
    run = new_run(tmp_path)
    end(run, 1)
    command = [sys.executable, "-m", "prl.cli.report", str(run.path)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert text.startswith("demo: done")
    plain = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(plain)["attempts"][0]["cause"] == "all 8 steps trained"


def test_what_should_not_lie_there_is_told_or_left_out(tmp_path, capsys):
    run = new_run(tmp_path)
    (run.path / "attempt_1000").touch()
    (run.metrics / "x.jsonl").mkdir()
    os.mkfifo(run.metrics / "y.jsonl")
    end(run, 1, outcome="failed", cause="a\x1b[2Jb", code=1)
    assert main([str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "cause       a\\x1b[2Jb" in out
    assert "x.jsonl: is no regular file" in out
    assert "y.jsonl: is no regular file" in out
    run.exit(1).write_text("[]")
    assert main([str(run.path)]) == 0
    assert f"{run.exit(1)}: is no object" in capsys.readouterr().out


def test_a_reader_that_has_read_enough_and_an_output_without_the_characters(tmp_path):
    run = new_run(tmp_path)
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        write_step(writer, 1, time=T0)
    command = [sys.executable, "-m", "prl.cli.report", str(run.path)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    posix = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=posix)
    assert "reward      0.100 ? 0.100" in done.stdout
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, timeout=60, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([0.5]) == "▁"
    assert sparkline([0, 0.5, 1]) == "▁▅█"
    assert len(sparkline(list(np.linspace(0, 1, 1000)))) == 60
    assert sparkline([1, 3, 5, 7], columns=2) == "▁█"


def test_what_is_damaged_in_a_run_is_a_note(tmp_path, capsys):
    run = new_run(tmp_path, attempts=2)
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        write_step(writer, 1, time=T0)
    path = run.metrics / "orchestrator-0.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    odd = [{**line, "step": 10**24}, {**line, "time": 1e300}, {**line, "values": {"a": 10**400}}, {**line, "attempt": None}]
    with path.open("a") as file:
        file.writelines(json.dumps(change) + "\n" for change in odd)
        file.write(json.dumps(line).replace(str(line["time"]), "NaN") + "\n" + "[" * 100_000 + "\n")
    run.exit(1).write_text('{"outcome": "failed", "cause": "it", "started": NaN, "ended": 1e400, "code": "x"}')
    for damaged in ("[]", "{", "", "\0\1", "[" * 100_000):
        run.exit(2).write_text(damaged)
        run.plan(2).write_text(damaged)
        assert main([str(run)]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        assert "demo: unknown" in said.out
        assert f"{run.exit(1)}: started = nan is no time" in said.out
        assert f"{run.exit(1)}: ended = inf is no time" in said.out
        assert said.out.count(f"{path}: skipped a line that is no event") == 6
        assert f"{run.exit(2)}: " in said.out
        assert f"{run.plan(2)}: is no plan of an attempt" in said.out
        assert main([str(run), "--json"]) == 0
        capsys.readouterr()


def put(kind, path):
    """Something that is no file, under a file's name."""
    path.unlink(missing_ok=True)
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        make = {
            "pipe": os.mkfifo,
            "loop": lambda path: path.symlink_to(path.name),
            "device": lambda path: path.symlink_to("/dev/zero"),
        }
        make[kind](path)


@pytest.mark.deadline(60)
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "loop"])
def test_what_is_no_file_is_told_and_not_waited_for(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    run = new_run(Path())
    run.config.write_text("run: {name: demo}\n")
    with LedgerWriter(run.ledger(1)) as ledger:
        ledger.append([LedgerEvent(RolloutId(0, "digits/1", 0, 0, 0), "issued", Version(0, 0), -1, "")])
    run.checkpoint(1).mkdir()
    for path in (run.exit(1), run.plan(1), run.manifest(1), run.metrics / "a.jsonl", run.reclaimed, run.batch_log(1)):
        put(kind, path)
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "demo: unknown" in out
    assert f"{run.exit(1)}: cannot be read, and does not say how the attempt ended" in out
    assert f"{run.plan(1)}: is no plan of an attempt" in out
    assert f"{run.metrics / 'a.jsonl'}: is " in out
    assert main([str(run), "--audit"]) == 1
    said = capsys.readouterr()
    assert f"  {run.exit(1)}: cannot be read, and does not say how the attempt ended" in said.out
    assert said.err == ""
    run.exit(1).unlink()
    assert main([str(run)]) == 0  # looks for what the batch script said
    assert main([str(run), "--audit"]) == 1
    assert f"  {run.reclaimed}: is " in capsys.readouterr().out
    run.reclaimed.unlink()
    assert main([str(run), "--audit"]) == 1
    assert f"  {run.plan(1)}: is no plan of an attempt" in capsys.readouterr().out
    run.plan(1).unlink()
    put(kind, ledger.path)
    for options in ([], ["--audit"]):
        main([str(run), *options])
        assert f"{ledger.path}: is " in capsys.readouterr().out
    manifest, refused = newest_manifest(run)
    assert manifest is None
    assert f"{run.manifest(1)}: is " in refused[0]
    put(kind, run.config)
    for options in ([], ["--audit"]):
        assert main([str(run), *options]) == 1
        assert capsys.readouterr().err.startswith(f"prl-report: error: {run.config}: is ")


def test_a_folder_that_is_a_link_to_itself_is_told(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    for options in ([], ["--audit"]):
        assert main([str(tmp_path / "loop"), *options]) == 1
        assert str(tmp_path / "loop") in capsys.readouterr().err


def test_checkpoints_that_were_passed_over_are_notes(tmp_path):
    run = new_run(tmp_path)
    run.plan(1).write_text(json.dumps({"lineage": 1, "forks": {}, "refused": ["checkpoint step_000010 is damaged"]}))
    assert "attempt 1: checkpoint step_000010 is damaged" in render(summarize(read_run(run.path), now=T0))


def test_failed_saves_and_skipped_steps_are_told(tmp_path):
    run = new_run(tmp_path)
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        for step in (1, 2, 3):
            writer.write({"train/skipped": float(step > 1), "train/loss": float("nan")}, step=step, kind="step", time=T0)
        writer.write({"checkpoint/failures": 1.0}, step=2, kind="save_failed", labels={"error": "disk: no space"}, time=T0)
    text = render(summarize(read_run(run.path), now=T0))
    assert "attempt 1: the checkpoint of step 2 failed: disk: no space" in text
    assert "skipped     2 steps left the weights as they were" in text


def test_samplers_that_failed_are_told_with_their_reasons(tmp_path):
    run = new_run(tmp_path, attempts=2)
    with MetricsWriter(run.metrics, "orchestrator", 0, 1) as writer:
        writer.write({}, kind="phase", labels={"name": "starting"}, time=T0)
        writer.write({"samplers/serving": 2.0}, kind="samplers", labels={"event": "they serve"}, time=T0)
        values = {"samplers/serving": 1.0, "samplers/restarts": 1.0, "samplers/fenced_died": 1.0}
        writer.write(values, kind="samplers", labels={"event": "sampler 1 was ended by SIGKILL"}, time=T0 + 30)
        values |= {"samplers/serving": 2.0}
        writer.write(values, kind="samplers", labels={"event": "sampler 1 serves"}, time=T0 + 55)
    text = render(summarize(read_run(run.path), now=T0))
    assert "fenced      1 died; 1 restarts; 2 serving at the last change" in text
    assert "     30.0 s sampler 1 was ended by SIGKILL\n" in text
    assert "     55.0 s sampler 1 serves\n" in text
    assert "they serve" not in text
    with MetricsWriter(run.metrics, "orchestrator", 0, 2) as writer:  # counts begin anew with each attempt
        values = {"samplers/serving": 1.0, "samplers/restarts": 2.0, "samplers/fenced_died": 2.0, "samplers/fenced_late": 1.0}
        writer.write(values, kind="samplers", labels={"event": "sampler 0 did not answer"}, time=T0 + 99)
    samplers = summarize(read_run(run.path), now=T0).samplers
    assert (samplers.serving, samplers.restarts, samplers.fenced) == (1, 3, {"died": 3, "late": 1})


def test_what_engines_counted_is_told_of_all_samplers(tmp_path):
    """Sampler 1 was started again within attempt 1, so that its counts begin anew; so they do with an attempt."""
    run = new_run(tmp_path, attempts=2)
    counts = {(1, 0): [(0.1, 4, 1), (0.3, 0, 2)], (1, 1): [(0.5, 9, 5), (0.2, 1, 0), (0.2, 2, 1)], (2, 0): [(0.9, 0, 3)]}
    for (attempt, index), lines in counts.items():
        with MetricsWriter(run.metrics, "sampler", index, attempt) as writer:
            for number, (share, waiting, preemptions) in enumerate(lines):
                values = {"kv_cache_share": share, "waiting": waiting, "preemptions": preemptions}
                if number == 1:
                    values["prefix_hit_share"] = 0.25
                writer.write({f"engine/{name}": value for name, value in values.items()}, kind="engine", time=T0 + number)
    summary = summarize(read_run(run.path), now=T0)
    assert summary.engines.preemptions == 2 + (5 + 1) + 3
    text = render(summary)
    assert "KV cache    p50 25 %, max 90 %" in text
    assert "prefix hits p50 25 %, max 25 %" in text
    assert "waiting     p50 2, max 9 requests of one sampler" in text
    assert "preempted   11 times" in text
