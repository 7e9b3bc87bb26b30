"""What the report says of the nodes before a run was loaded there."""

import json
import time

import pytest

from prl.report.read import read_run
from prl.report.render import render
from prl.report.summary import as_json, summarize
from prl.runfolder.paths import RunFolder


def node(offset_s):
    return {"clock": {"offset_s": offset_s, "error_s": 0.001}}


def link(name, there, back, error=""):
    return {"node": name, "peer": "n1", "to_peer_mib_per_s": there, "from_peer_mib_per_s": back, "error": error}


CONTENT = {
    "took_s": 0.61,
    "nodes": {"n1": node(0.0), "n2": node(-0.004), "n3": node(0.002), "n4": {"clock": None}},
    "links": [link("n2", 900.0, 1100.0), link("n3", 1200.0, 400.0), link("n4", 0.0, 0.0, "refused")],
    "findings": [{"nodes": [], "words": "storage target OST1 is 99 % full", "ends": None}],
}


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    for attempt in (1, 2):
        run.attempt(attempt).mkdir()
    run.config.write_text("run: {name: one}\n")
    return run


def report(run):
    return render(summarize(read_run(run.path), time.time()))


def test_bandwidth_slowest_node_and_clocks_of_the_last_attempt(run):
    run.preflight(1).write_text(json.dumps(CONTENT))
    line = "  preflight   4 nodes in 610.0 ms; TCP 900 MiB/s, slowest 400 (n3 with n1); clocks within 4.0 ms (n2)"
    text = report(run)
    assert line in text.splitlines()
    assert "  attempt 1, preflight: storage target OST1 is 99 % full" in text.splitlines()
    plain = as_json(summarize(read_run(run.path), time.time()))["preflight"]
    assert (plain["slowest"], plain["median_mib_per_s"]) == (["n3", "n1", 400.0], 900.0)
    alone = {"took_s": 0.05, "nodes": {"localhost": node(0.0)}, "links": [], "findings": []}
    run.preflight(2).write_text(json.dumps(alone))
    assert "  preflight   1 node in 50.0 ms" in report(run).splitlines()


@pytest.mark.parametrize(
    "damaged",
    ["", "[]", "{", json.dumps({**CONTENT, "took_s": "soon"}), json.dumps({**CONTENT, "links": [{}]}), '{"took_s": NaN}'],
)
def test_a_damaged_one_is_a_note(run, damaged):
    run.preflight(1).write_text(damaged)
    text = report(run)
    assert f"{run.preflight(1)}: does not say what the nodes were like" in text
    assert "  preflight   " not in text
