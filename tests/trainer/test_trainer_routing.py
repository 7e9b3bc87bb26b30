"""What samplers tell of experts is checked before it steers the trainer's."""

from dataclasses import replace

import numpy as np
import pytest

from prl.config.hf_config import model_config, new_model_config
from prl.trainer.batch import idle_microbatch
from prl.trainer.options import ModelOptions
from prl.trainer.routing import check_routings

EXPERTS = ModelOptions(init="random", architecture="qwen3_moe", layers=3, experts=8, experts_per_token=2)


@pytest.mark.parametrize(
    ("model", "routings", "fits"),
    [
        (EXPERTS, np.full((1, 3, 2), 7), True),
        (EXPERTS, np.full((1, 3, 2), -1), True),
        (EXPERTS, None, True),
        (EXPERTS, np.full((1, 3, 2), 8), False),
        (EXPERTS, np.zeros((1, 2, 2), int), False),
        (EXPERTS, np.zeros((1, 3, 1), int), False),
        (replace(EXPERTS, architecture="qwen3"), np.zeros((1, 3, 2), int), False),
    ],
)
def test_only_routings_of_the_trainers_model_are_followed(model, routings, fits):
    batch = replace(idle_microbatch(), routings=None if routings is None else routings.astype(np.int16))
    config = model_config(new_model_config(model, end=0, pad=0))
    if fits:
        check_routings(batch, config)
    else:
        with pytest.raises(ValueError, match=f"the model has 3 layers, {config.experts_per_token} experts a token"):
            check_routings(batch, config)
