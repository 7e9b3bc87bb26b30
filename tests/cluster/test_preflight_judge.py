"""What measurements come to: which node is blamed for what, and what the run ends of."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.cluster.options import PreflightOptions
from prl.cluster.preflight.devices import Device, Devices
from prl.cluster.preflight.judge import Finding, judge_links, judge_node, judge_storage, late, verdict
from prl.cluster.preflight.lustre import Limits, Quota, Target, Targets
from prl.cluster.preflight.measure import Clock, NodeFacts, Room
from prl.cluster.preflight.storage import Storage
from prl.cluster.preflight.transfer import Link, pairs, turns_s

GIB = 1024**3
OPTIONS = PreflightOptions()  # 2 s, 1 GiB of memory, 1 GiB and 1,000 files of room, 100 ports, 4 GiB in use, 98 %, 20 MiB/s
WELL = NodeFacts("word", Clock(0.001, 0.001), 8 * GIB, Room("/tmp", 9 * GIB, 10**6), 11_000, None, {})
DEVICE = Device(0, "H200", 0, 0, False, False)


def words_of(facts, devices=0, canary="word"):
    found = list(judge_node("n3", facts, canary, OPTIONS, devices))
    assert all(finding.nodes == ("n3",) and finding.words.startswith("n3: ") for finding in found)
    return [(finding.words.removeprefix("n3: "), finding.ends) for finding in found]


@pytest.mark.parametrize("facts", [WELL, replace(WELL, room=Room("/tmp", 9 * GIB, None))])
def test_nothing_is_said_of_a_node_that_will_do(facts):
    assert words_of(facts) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"canary": "other"}, "the run folder that it sees is not the one that rank 0 sees"),
        ({"clock": Clock(2.2, 0.1)}, "its clock is 2.2 s ahead of the orchestrator's, more than cluster.preflight.clock_s = 2"),
        ({"clock": Clock(-61.0, 0.1)}, "its clock is 61.0 s behind the orchestrator's"),
        ({"memory_bytes": GIB // 2}, "0.50 GiB of memory are free, less than cluster.preflight.memory_gib = 1"),
        ({"room": Room("/tmp", GIB - 1, 10**6)}, "1.00 GiB are free in /tmp for temporary files, less than"),
        ({"room": Room("/tmp", 9 * GIB, 999)}, "999 files may still be made in /tmp"),
        ({"ports": 99}, "about 99 ports between 20,000 and 32,000 are free"),
        ({"memory_bytes": None, "failed": {"memory": "no answer within 20 s"}}, "memory: no answer within 20 s"),
    ],
)
def test_each_thing_that_is_amiss_is_told_with_its_limit(change, words):
    ((said, ends),) = words_of(replace(WELL, **change))
    assert (said.startswith(words), ends) == (True, "bad node"), said


def test_a_clock_is_blamed_only_for_what_it_is_off_for_certain():
    assert words_of(replace(WELL, clock=Clock(2.2, 0.3))) == []


def test_a_folder_that_rank_0_does_not_see_either_is_no_fault_of_another_node():
    assert words_of(WELL, canary=None) == []


@pytest.mark.parametrize(
    ("devices", "words", "ends"),
    [
        (Devices((DEVICE, replace(DEVICE, index=1)), ()), None, None),
        (Devices((DEVICE,), ()), "1 accelerators are there, and 2 are wanted", "bad node"),
        (Devices((DEVICE,), ("GPU is lost",)), "nvidia-smi says: GPU is lost", "bad node"),
        (Devices((DEVICE, Device(1, "", None, None, None, None, "[GPU is lost]")), ()), "accelerator 1 does not", "bad node"),
        (Devices((DEVICE, replace(DEVICE, index=1, repair_failed=True)), ()), "accelerator 1 (H200) has broken", "bad node"),
        (Devices((DEVICE, replace(DEVICE, index=1, used_bytes=5 * GIB)), ()), "accelerator 1 (H200): 5.00 GiB", "bad node"),
        (Devices((DEVICE, replace(DEVICE, index=1, uncorrected_errors=3)), ()), "accelerator 1 (H200) had 3", None),
        (Devices((DEVICE, replace(DEVICE, index=1, repair_pending=True)), ()), "accelerator 1 (H200) has broken", None),
    ],
)
def test_of_the_accelerators_that_the_run_uses_it_is_said_which_will_not_do(devices, words, ends):
    found = words_of(replace(WELL, devices=devices), devices=2)
    assert [(said[: len(words)], why) for said, why in found] == [(words, ends)] if words else not found


def test_accelerators_that_the_run_does_not_use_are_left_alone():
    others = Devices((DEVICE, replace(DEVICE, index=1, used_bytes=50 * GIB, repair_failed=True)), ())
    assert words_of(replace(WELL, devices=others), devices=1) == []


def test_accelerators_need_not_be_a_nodes_first_ones():
    given = Devices((replace(DEVICE, index=4), replace(DEVICE, index=6, repair_failed=True)), ())
    ((words, ends),) = words_of(replace(WELL, devices=given), devices=2)
    assert words.startswith("accelerator 6 (H200) has broken")
    assert ends == "bad node"


def limits(used, soft=0, hard=0, over=False, grace="-"):
    return Limits(used, soft, hard, over, grace)


@pytest.mark.parametrize(
    ("blocks", "files", "words", "ends"),
    [
        (limits(5 * GIB), limits(10), None, None),
        (limits(5 * GIB, hard=7 * GIB), limits(10, hard=2000), None, None),
        (limits(5 * GIB, hard=5 * GIB + 1), limits(10), "the quota of usr a on /l leaves 0.00 GiB, less than", "quota"),
        (limits(5 * GIB), limits(1500, hard=2000), "the quota of usr a on /l leaves 500 files", "quota"),
        (limits(5 * GIB, 4 * GIB, 9 * GIB, True, "6d"), limits(10), "the quota of usr a on /l is exceeded: writing", None),
        (limits(5 * GIB, 4 * GIB, 9 * GIB, True, "none"), limits(10), "the quota of usr a on /l leaves 0.00 GiB", "quota"),
        (limits(5 * GIB), limits(10, 9, 9999, True, "1d"), "the quota of usr a on /l for files is exceeded", None),
    ],
)
def test_a_quota_ends_the_run_where_it_leaves_too_little_and_is_warned_of_before(blocks, files, words, ends):
    storage = Storage(Room("/l/run", 9 * GIB, None), (Quota("usr a", "/l", blocks, files),), None, ())
    found = [(finding.words, finding.ends, finding.nodes) for finding in judge_storage(storage, OPTIONS)]
    assert [(said[: len(words)], why, nodes) for said, why, nodes in found] == [(words, ends, ())] if words else not found


def test_the_filesystem_of_the_run_folder_is_nobodys_fault():
    targets = Targets((Target("OST0", GIB, 98), Target("OST1", 2**16, 99)), ("OST2: inactive device",))
    full = Storage(Room("/l/run", GIB // 4, 5), (), targets, ())
    found = list(judge_storage(full, OPTIONS))
    assert [finding.ends for finding in found] == ["quota", "quota", None, None]
    assert "0.25 GiB are free in /l/run" in found[0].words
    assert "OST2: inactive device" in found[2].words
    assert "OST1 is 99 % full" in found[3].words
    assert not any(finding.nodes for finding in found)
    (silent,) = judge_storage(Storage(None, (), None, ("/l/run: no answer within 20 s",)), OPTIONS)
    assert (silent.words, silent.ends) == ("/l/run: no answer within 20 s", "error")
    (unasked,) = judge_storage(Storage(Room("/l/run", 9 * GIB, None), (), None, ("/l/run: lfs: exit code 2",)), OPTIONS)
    assert unasked.ends is None


FAST, SLOW = (
    {"to_peer_mib_per_s": 900.0, "from_peer_mib_per_s": 800.0},
    {"to_peer_mib_per_s": 900.0, "from_peer_mib_per_s": 9.0},
)
DEAD = {"error": "no route to host"}


@pytest.mark.parametrize(
    ("links", "blamed"),
    [
        ([("n2", "n1", FAST), ("n3", "n1", FAST)], []),
        ([("n2", "n1", FAST), ("n3", "n1", SLOW)], [("n3",)]),
        ([("n2", "n1", DEAD), ("n3", "n1", SLOW)], [("n1",), ("n1",)]),  # all that it had to do with
        ([("n2", "n1", DEAD)], [("n2", "n1")]),
        ([("n3", "n1", DEAD), ("n4", "n2", FAST), ("n5", "n1", FAST)], [("n3",)]),
    ],
)
def test_of_a_bad_link_the_node_is_blamed_that_the_others_do_not_speak_for(links, blamed):
    found = list(judge_links([Link(node, peer, **facts) for node, peer, facts in links], OPTIONS))
    assert [finding.nodes for finding in found] == blamed
    assert all(finding.ends == "bad node" for finding in found)
    for finding, (_, _, facts) in zip(found, [link for link in links if link[2] is not FAST], strict=True):
        assert ("no route to host" if facts is DEAD else "9.0 MiB/s go over TCP") in finding.words


@given(st.lists(st.sampled_from([0, 1]), max_size=40))
@settings(deadline=None)
def test_every_node_of_the_larger_component_has_a_peer_in_the_other(components):
    found = pairs(components)
    few = min(components.count(0), components.count(1))
    if not few:
        assert found == {}
        return
    assert len(found) == max(components.count(0), components.count(1))
    assert all(components[node] != components[peer] for node, peer in found.items())
    peers = list(found.values())
    shares = [peers.count(peer) for peer in set(peers)]
    assert len(shares) == few
    assert max(shares) - min(shares) <= 1
    assert turns_s(found) == 10.0 + 15.0 * max(shares)


def test_the_verdict_names_the_nodes_with_the_line_to_copy():
    warning, storage = Finding((), "an OST is full", None), Finding((), "no room in /l", "quota")
    third, second = Finding(("n3",), "n3: slow"), Finding(("n2",), "n2: no memory")
    assert verdict([], "") is None
    assert verdict([warning], "") is None
    one = verdict([warning, third], "")
    assert (one.nodes, one.reason) == (("n3",), "bad node")
    assert one.words == "preflight: n3: slow. To submit the run again without it: --exclude=n3"
    two = verdict([third, second, third], "n7")
    assert two.nodes == ("n3", "n2")
    assert two.words.endswith("again without them: --exclude=n7,n3,n2")
    assert verdict([third], None).words == "preflight: n3: slow"  # of no Slurm job
    full = verdict([storage, warning], "")
    assert (full.words, full.nodes, full.reason) == ("preflight: no room in /l", (), "quota")
    many = verdict([Finding((f"n{k}",), f"n{k}: slow") for k in range(9)], "")
    assert "n4: slow; and 4 findings more, in preflight.json" in many.words
    assert "n5: slow" not in many.words
    assert many.words.endswith("--exclude=n0,n1,n2,n3,n4,n5,n6,n7,n8")


def test_a_node_that_says_nothing_is_bad():
    silent, absent = late({"n2": True, "n3": False}, 300.0)
    assert (silent.words, silent.nodes) == ("n2: its agent did not answer within 300 s", ("n2",))
    assert absent.words == "n3: its agent did not join the run within 300 s"
