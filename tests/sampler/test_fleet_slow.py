"""Two real samplers get versions as differences, through the orchestrator's own parts."""

from dataclasses import replace

import pytest
from answers import PROMPT, greedy_answer
from fleet import Fleet, fleet
from inflight import drifting_models
from launch import WEIGHTS
from tiny_models import weights_of

from prl.weights.digest import digest

pytestmark = pytest.mark.slow
TOKENS = 60


def test_differences_serve_as_whole_versions_do(tmp_path):
    """Over a version that was passed over, one that was sent twice, one that a replica got with a flipped byte and was given
    again by the other one, and over what comes after that."""
    models = drifting_models(9)
    weights = [weights_of(model) for model in models]
    whole = sum(4 * tensor.numel() for tensor in weights[0].values())

    def check(fleet: Fleet, step: int, *replicas: int) -> None:
        expected = greedy_answer(models[step], PROMPT, TOKENS)
        for replica in replicas:
            body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}}
            status, reply = fleet.post(replica, "/prl/generate", body)
            assert status == 200, reply
            (answer,) = reply["answers"]
            assert answer["token_ids"] == expected
            assert answer["versions"] == [[f"0:{step}", 0, TOKENS]]
        committed = fleet.committed[-1]
        assert (str(committed.version), committed.digest) == (f"0:{step}", str(digest(weights[step])))
        assert not fleet.errors

    with fleet(tmp_path, 2, replace(WEIGHTS, delta=True, update_s=20.0)) as samplers:
        report = samplers.publish(0, weights[0])
        assert report.changed_share is None  # nobody holds anything
        check(samplers, 0, 0, 1)
        for step in (1, 2):
            report = samplers.publish(step, weights[step])
            assert report.changed_share == pytest.approx(1 / 50, rel=0.1)
            assert report.bytes < 0.05 * whole
            check(samplers, step, 0, 1)

        report = samplers.send(3, weights[3])  # the update lasts
        assert samplers.publish(4, weights[4]) is None  # passed over
        samplers.tell_sent(3, report)
        report = samplers.publish(5, weights[5])
        assert report.changed_share == pytest.approx(2 / 50, rel=0.1)  # to version 3
        check(samplers, 5, 0, 1)

        again = samplers.publish(5, weights[5])
        assert (again.changed_share, again.digest) == (0.0, report.digest)
        check(samplers, 5, 0, 1)

        assert samplers.post(1, "/collective_rpc", {"method": "flip_next_delta"})[0] == 200
        report = samplers.publish(6, weights[6])
        assert report.changed_share == pytest.approx(1 / 50, rel=0.1)
        fault = "sampler 1 worker 0 staged other weights than the trainer sent for version 0:6: digest "
        (told,) = [words for words in samplers.words if words.startswith(fault)]
        assert told.endswith(f", not {report.digest}")
        check(samplers, 6, 0)
        samplers.wait_until_serving(0, 1)
        assert any(words.startswith("sampler 1 serves: it has version 0:6 from sampler 0, ") for words in samplers.words)
        assert samplers.membership.reasons == {"mismatch": 1}
        check(samplers, 6, 0, 1)

        assert samplers.publish(7, weights[7]).changed_share is None  # not all had committed what was sent
        check(samplers, 7, 0, 1)
        assert samplers.publish(8, weights[8]).changed_share == pytest.approx(1 / 50, rel=0.1)
        check(samplers, 8, 0, 1)
