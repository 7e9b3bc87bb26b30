"""Options of the preprocessor: from groups of rollouts to step files."""

from dataclasses import dataclass
from typing import Annotated, Literal

from prl.config.bounds import AtLeast


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    advantage: Annotated[
        Literal["leave_one_out", "group_std"],
        "leave_one_out: reward minus the mean of the group's others; group_std: (reward - group mean) / (group std + 1e-6)",
    ] = "group_std"
    token_weight: Annotated[
        Literal["token", "sample"], "token: every trained token of a step weighs the same; sample: every rollout does"
    ] = "token"
    drop_equal_groups: Annotated[bool, "discard groups whose rewards are all equal and sample others instead"] = False
    mask_cut: Annotated[bool, "rollouts cut at the token limit do not train"] = False
    pack_tokens: Annotated[int, "tokens of one micro-batch of one trainer rank; longer rollouts are discarded", AtLeast(1)] = (
        8192
    )
