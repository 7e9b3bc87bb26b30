"""The quickstart, whole: real vLLM, real Megatron, one command."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from whole_runs import learned, submit

from prl.flow.versions import Version
from prl.streams.files import list_published
from prl.streams.ledger import ledger_events, read_ledger
from prl.weights.digest import digest

pytestmark = pytest.mark.deadline(600)


def test_it_learns_and_ends_well(quickstart):
    assert quickstart.code == 0, quickstart.logs()
    assert quickstart.exit["outcome"] == "done"
    assert "reached 0.9" in quickstart.exit["cause"]
    assert learned(quickstart), quickstart.held_out()
    first = quickstart.held_out()[0]
    assert first[0] == 0
    assert first[1] < 0.2  # from random weights


def test_progress_and_the_folder_are_told(quickstart):
    assert "held-out" in quickstart.output
    assert f"run folder: {quickstart.folder}" in quickstart.output


def test_every_token_has_one_version_and_they_only_rise(quickstart):
    for turn in turns_of(quickstart):
        covered = [token for span in turn.versions for token in range(span.start, span.end)]
        assert covered == list(range(len(turn.output_ids)))
        steps = [span.version.step for span in turn.versions]
        assert steps == sorted(set(steps))


def turns_of(ended):
    return [turn for group in ended.groups() for rollout in group.rollouts for turn in rollout.turns]


def test_the_lag_stays_within_its_limit_and_is_no_zero(quickstart):
    lags = [event.values["train/lag_max"] for event in quickstart.events("step")]
    assert max(lags) <= quickstart.config.run.max_lag
    assert max(lags) >= 1  # it is asynchronous


def test_the_exported_model_has_the_digest_of_the_last_version(quickstart):
    """What all samplers served last, by the digest of their live parameters, is what the folder holds, bit for bit."""
    last = quickstart.events("weights")[-1].labels
    assert last["version"] == f"0:{quickstart.exit['steps']}"
    exported = load_file(quickstart.folder.export / "model.safetensors")
    assert str(digest(exported)) == last["digest"]
    digests = [event.labels["digest"] for event in quickstart.events("weights")]
    assert len(set(digests)) == len(digests)  # every step changed the weights


def test_every_issued_rollout_has_one_end(quickstart):
    events = list(ledger_events(read_ledger(quickstart.folder.ledgers)))
    issued = Counter(event.rollout for event in events if event.kind == "issued")
    ended = Counter(event.rollout for event in events if event.kind != "issued")
    assert max(issued.values()) == 1
    assert issued == ended
    trained = [event for event in events if event.kind == "trained"]
    assert len(trained) == quickstart.exit["steps"] * 512


def test_the_manifest_and_the_metrics_are_there(quickstart):
    folder = quickstart.folder
    manifest = json.loads(folder.manifests()[-1][1].read_text())
    assert manifest["step"] == quickstart.exit["steps"]
    assert manifest["step"] <= manifest["streams"]["steps"] <= manifest["step"] + 2  # step files that nobody needed any more
    files = [file.sequence for _, file in list_published(folder.rollouts / "actor-000")]
    assert list(manifest["streams"]["rollouts"]) == ["actor-000"]
    assert manifest["step"] // 2 < manifest["streams"]["rollouts"]["actor-000"] <= max(files)
    assert list(folder.tensorboard.glob("events.out.tfevents.*"))
    assert [event.step for event in quickstart.events("step")] == list(range(1, quickstart.exit["steps"] + 1))
    pauses = [event.values["weights/pause_s"] for event in quickstart.events("weights")]
    assert len(pauses) == quickstart.exit["steps"] + 1  # version 0 too


def test_a_run_goes_on_after_it_was_stopped(quickstart, tmp_path):
    """The finished run again, for more steps: the counters go on, the reward stays, a new lineage begins, and its first version
    is what was exported. All that it lacks may be sampled at once, and only a few requests at a time: so the sampler is busy
    when new weights come, however fast the trainer is, and requests in flight go on."""
    more = quickstart.exit["steps"] + 10
    before = quickstart.exit["steps"]
    exported = shutil.copytree(quickstart.folder.export, tmp_path / "export")  # the resumed run replaces it
    changes = (f"run.steps={more}", "run.max_lag=10", "sample.max_num_seqs=4", "run.stop_at_reward=null")
    resumed = submit(quickstart.folder.path, "--resume", quickstart.folder.path, "--set", *changes)
    assert resumed.code == 0, resumed.logs()
    assert resumed.exit["steps"] == more
    assert [event.step for event in resumed.events("step", attempt=2)] == list(range(before + 1, more + 1))
    assert resumed.held_out(attempt=2)[-1][1] > 0.9
    events = list(ledger_events(read_ledger(resumed.folder.ledgers)))
    assert Counter(e.rollout for e in events if e.kind == "issued") == Counter(e.rollout for e in events if e.kind != "issued")
    check_logprobs(resumed, Version(1, before), exported)
    assert max(len(turn.versions) for turn in turns_of(resumed) if turn.versions[0].version.lineage == 1) >= 2


def check_logprobs(ended, version, exported):
    """Log-probs that vLLM recorded under a version equal those of its exported folder in transformers."""
    answers = [turn for turn in turns_of(ended) if [span.version for span in turn.versions] == [version]]
    assert len(answers) >= 64
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    for turn in answers[:64]:
        ids = torch.tensor(np.concatenate([turn.prompt_ids, turn.output_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        first = len(turn.prompt_ids) - 1
        expected = logprobs[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0]
        assert torch.allclose(torch.tensor(np.array(turn.logprobs)), expected, atol=1e-4)
