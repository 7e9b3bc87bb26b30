"""A sampler's end of transfers: whole, as deltas and by lanes; and those that break, which a new epoch mends."""

import contextlib
import os
import time

import psutil
from answers import LONG, PROMPT
from inflight import nudged
from lane_trainer import lane_trainer, meet, route_to
from tiny_models import weights_of

from prl.weights.delta import HEADER_BYTES
from prl.weights.digest import digest
from prl.weights.group import TransportError
from prl.weights.legs import changed_share
from prl.weights.plan import schedule


def test_a_transfer_that_breaks_off_is_reported_and_a_new_epoch_mends_it(lab, models):
    lab.connect()
    lab.update(weights_of(models[0]))
    assert lab.offer(weights_of(models[1])).status == 200
    lab.trainer.close()
    report = lab.staged.get(timeout=30)
    assert report["step"] == lab.step
    assert "bucket 1 of 1 from the trainer" in report["error"]
    assert (report["missing"], report["halt"]["reached"], report["halt"]["overdue"]) == ([], 2, False)
    assert lab.offer(weights_of(models[1])).status == 200  # and without a new epoch
    assert "no group for version" in lab.staged.get(timeout=30)["error"]
    assert lab.generate(PROMPT, max_tokens=3).result(30).status == 200
    lab.connect()
    lab.update(weights_of(models[1]))


def test_threads_that_receive_stand_behind_those_that_sample(lab, models):
    """Our own and gloo's, in the process of the engine; its first thread samples."""
    lab.connect()
    lab.update(weights_of(models[0]))
    server = psutil.Process(lab.process.pid)
    nice: dict[int, list[int]] = {}
    for process in (server, *server.children(recursive=True)):
        own = os.getpriority(os.PRIO_PROCESS, process.pid)
        nice[process.pid] = [os.getpriority(os.PRIO_PROCESS, thread.id) - own for thread in process.threads()]
    engine = max(nice, key=lambda pid: nice[pid].count(5))
    assert nice[engine].count(5) >= 2
    assert {more for pid, threads in nice.items() for more in threads if pid != engine} == {0}
    assert set(nice[engine]) == {0, 5}


def test_versions_that_come_as_deltas_are_what_the_trainer_has(lab, models):
    """One after the other, each verified by the digest of the live parameters; also where the one before was not committed."""
    weights = weights_of(models[0])
    lab.update(weights)
    whole, held = sum(4 * tensor.numel() for tensor in weights.values()), digest(weights)
    for seed, commits in ((1, True), (2, False), (3, True), (3, True)):
        weights = nudged(weights, seed)
        report, staged = lab.send(weights, held)
        held = digest(weights)
        assert staged["digest"] == str(report.digest) == str(held)
        assert report.bytes < 0.05 * whole
        assert 0.01 < report.changed_share < 0.03
        if commits:
            assert lab.commit(held).status == 200
    lab.take(lab.store(weights), weights)  # a seed leaves what the group has brought
    report, _ = lab.send(nudged(weights, 4), held)
    assert 0.01 < report.changed_share < 0.03
    assert lab.commit(report.digest).status == 200
    reply = lab.generate(PROMPT, max_tokens=3).result(30)
    assert reply.body["choices"][0]["weight_versions"][0]["version"] == f"0:{lab.step}"


def test_a_delta_to_what_a_worker_does_not_hold_is_refused_and_a_new_epoch_mends_it(lab, models):
    weights = weights_of(models[0])
    lab.update(weights)
    assert lab.request("POST", "/collective_rpc", {"method": "forget_version"}).status == 200
    assert lab.offer(weights).status == 200
    with contextlib.suppress(TransportError):  # it may be on its way before the sampler leaves
        lab.trainer.send(nudged(weights, 1), digest(weights))
    report = lab.staged.get(timeout=30)
    assert report["step"] == lab.step
    assert f"a delta to the weights with digest {digest(weights)}, but nothing to apply it to is held" in report["error"]
    lab.connect()
    lab.update(nudged(weights, 1))


def test_versions_that_come_by_lanes_serve_as_those_that_come_whole(lab, models):
    lab.update(weights_of(models[1]))
    (whole,) = lab.ask(PROMPT, max_tokens=60, ignore_eos=True).result(60).body["answers"]
    with lane_trainer(lab) as trainer:
        labels = {}
        for model in models[:2]:
            reports = trainer.update(weights_of(model))
            labels[f"0:{lab.step}"] = model
        headers = HEADER_BYTES * len(schedule(trainer.route.plan, trainer.route.bucket_bytes))
        assert sum(report.bytes for report in reports) <= headers + sum(spec.bytes for spec in trainer.route.plan.tensors)
        assert all(report.bytes for report in reports)  # each root sends
        (answer,) = lab.ask(PROMPT, max_tokens=60, ignore_eos=True).result(60).body["answers"]
        assert answer["token_ids"] == whole["token_ids"]
        assert answer["versions"] == [[f"0:{lab.step}", 0, 60]]
        stream = lab.stream(PROMPT, max_tokens=LONG, temperature=0.0)
        trainer.update(weights_of(models[2]))
        labels[f"0:{lab.step}"] = models[2]
        assert [span["version"] for span in stream.last["weight_versions"]] == list(labels)[-2:]
    lab.connect()
    lab.update(weights_of(models[1]))  # whole again


def test_versions_that_come_as_deltas_by_lanes_are_what_the_trainer_has(lab, models):
    """To the live version, which the trainer knows to be committed; each verified by the digest of the live parameters."""
    weights = weights_of(models[0])
    with lane_trainer(lab) as trainer:
        whole = sum(report.bytes for report in trainer.update(weights))
        for seed in (1, 2, 3):
            weights = nudged(weights, seed)
            reports = trainer.update(weights)
            assert sum(report.bytes for report in reports) < 0.05 * whole
            assert 0.01 < changed_share(leg for report in reports for leg in report.legs) < 0.03
        trainer.send(nudged(weights, 4), held=True)  # and is not committed
        reports = trainer.update(weights)  # so that all of the next one comes
        assert sum(report.bytes for report in reports) == whole
    lab.connect()


def test_a_delta_by_lanes_to_what_is_not_live_is_refused_and_a_new_epoch_mends_it(lab, models):
    weights = weights_of(models[0])
    with lane_trainer(lab) as trainer:
        trainer.update(weights)
        assert lab.request("POST", "/collective_rpc", {"method": "forget_version"}).status == 200
        report = trainer.refused(nudged(weights, 1))
        assert "but nothing to apply it to is held: a dense version has to come first" in report["error"]
    with lane_trainer(lab) as trainer:
        trainer.update(nudged(weights, 1))
    lab.connect()


def test_lanes_that_do_not_lead_to_this_sampler_are_refused_before_they_are_built(lab, models):
    lab.update(weights_of(models[0]))
    plan, epoch = route_to(lab).plan.digest(), lab.epoch
    for reply, words in (
        (meet(lab, plan, ranks=4), f"plan is {plan} at the trainer"),
        (meet(lab, "another"), f"and {plan} at sampler 0, worker 0,"),
        (meet(lab, plan, ranks="2"), "lanes: expected {trainer_ranks, samplers: [number of a replica...]}"),
        (meet(lab, plan, ranks=-1), "trainer ranks"),
    ):
        assert reply.status == 400, reply
        assert words in reply.body["error"]
    lab.epoch = epoch
    lab.update(weights_of(models[1]))  # the group of before still stands


def test_an_error_that_is_none_of_the_transports_is_reported_too(lab, models):
    """The thread that waits for the trainer lives on and tells of it with the next receive."""
    lab.update(weights_of(models[0]))
    assert lab.request("POST", "/collective_rpc", {"method": "break_group", "args": ["receive"]}).status == 200
    assert lab.offer(weights_of(models[1])).status == 200
    report = lab.staged.get(timeout=30)
    assert (report["step"], report["epoch"]) == (lab.step, lab.epoch)
    assert "KeyError: 'receive is broken'" in report["error"]
    assert lab.ask(PROMPT, max_tokens=3).result(30).status == 200
    lab.trainer.close()
    lab.connect()
    lab.update(weights_of(models[1]))


def test_a_group_that_waits_for_others_or_cannot_be_closed_does_not_hold_up_the_next_one(lab, models):
    lab.update(weights_of(models[0]))
    assert lab.request("POST", "/collective_rpc", {"method": "break_group", "args": ["close"]}).status == 200
    lab.epoch += 1
    assert lab.request("POST", "/prl/weights/connect", lab.meeting(lab.epoch)).status == 200  # the trainer does not come
    assert lab.offer(weights_of(models[1])).status == 200
    began = time.monotonic()
    lab.connect()
    lab.update(weights_of(models[1]))
    assert time.monotonic() - began < 10  # of the 30 s that the other groups would wait
    assert lab.staged.empty()  # nobody is told of what was left
