"""The live version in files, and versions that are read from there."""

from answers import LONG, PROMPT, greedy_answer
from tiny_models import weights_of

from prl.runfolder.weights import folder_of
from prl.weights.digest import digest
from prl.weights.plan import to_json
from prl.weights.transport import spec_of


def test_the_live_version_goes_into_files_and_another_state_takes_it_from_there(lab, models):
    lab.update(weights_of(models[0]))
    asked = lab.ask(PROMPT, max_tokens=LONG, ignore_eos=True)
    stored = lab.store(weights_of(models[0]))
    assert stored.digest == digest(weights_of(models[0]))
    assert asked.result(60).status == 200  # meanwhile it serves
    lab.update(weights_of(models[1]))
    in_flight = lab.ask(PROMPT, max_tokens=LONG, ignore_eos=True)
    lab.take(stored, weights_of(models[0]))
    versions = in_flight.result(60).body["answers"][0]["versions"]
    assert [label for label, _, _ in versions] == [f"0:{lab.step}", str(stored.version)]
    (answer,) = lab.ask(PROMPT, max_tokens=60, ignore_eos=True).result(60).body["answers"]
    assert answer["token_ids"] == greedy_answer(models[0], PROMPT, 60)
    refused = lab.request(
        "POST", "/prl/weights/store", {"lineage": 0, "step": lab.step, "seed": 1, "folder": "nowhere", "tensors": []}
    )
    words = f"version 0:{lab.step} cannot be stored: version {stored.version} is live"
    assert (refused.status, refused.body) == (409, {"error": words})


def test_files_that_are_damaged_or_missing_are_named_and_the_live_version_serves_on(lab, models):
    lab.update(weights_of(models[0]))
    stored = lab.store(weights_of(models[0]))
    path = folder_of(lab.folder.weights, stored.version) / stored.files[0].path
    whole = path.read_bytes()
    for damaged, words in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), "is damaged: digest"),
        (whole[:-9], f"has {len(whole) - 9} bytes, of {len(whole)}"),
    ):
        path.write_bytes(damaged)
        (report,) = lab.load(stored, weights_of(models[0]))
        assert f"StoredError: {path}: " in report["error"]
        assert words in report["error"]
        assert (report["seed"], report["step"]) == (2, lab.step)
    path.unlink()
    (report,) = lab.load(stored, weights_of(models[0]))
    assert f"StoredError: {path}: No such file" in report["error"]
    assert lab.ask(PROMPT, max_tokens=3).result(60).status == 200
    lab.update(weights_of(models[1]))  # and the group stands


def test_a_version_that_arrives_takes_the_place_of_one_that_is_read(lab, models):
    """The files never come: the sampler would look for them for 30 s."""
    lab.update(weights_of(models[0]))
    tensors = to_json(spec_of(name, tensor) for name, tensor in weights_of(models[0]).items())
    body = {"lineage": 0, "step": 10**6, "epoch": lab.epoch, "seed": 3, "tensors": tensors}
    assert lab.request("POST", "/prl/weights/load", body).status == 200
    lab.update(weights_of(models[1]))
    assert lab.ask(PROMPT, max_tokens=3).result(60).status == 200
    assert lab.staged.empty()
