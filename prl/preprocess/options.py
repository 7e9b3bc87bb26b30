"""Options of the preprocessor: from groups of rollouts to step files."""

from dataclasses import dataclass
from typing import Annotated, Literal

from prl.config.bounds import AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    advantage: Annotated[
        Literal["leave_one_out", "group_mean", "group_std", "maxrl", "batch_normalised", "reward"],
        "leave_one_out (RLOO): reward minus the mean of the group's others; group_mean: reward - group mean; group_std (GRPO): "
        "(reward - group mean) / (group std + 1e-6); maxrl: (reward - group mean) / group mean, for rewards of 0 or more; "
        "batch_normalised: (reward - group mean) / (std of that over the step + 1e-6); reward: the reward itself, without "
        "comparison (what train.value_head needs)",
    ] = "group_std"
    baseline: Annotated[
        Literal["rollout", "turn"],
        "what a reward is compared with: rollout: those of all rollouts of the group; turn: for the tokens of turn t those of "
        "the rollouts that have a turn t",
    ] = "rollout"
    token_weight: Annotated[
        Literal["token", "sample"], "token: every trained token of a step weighs the same; sample: every rollout does"
    ] = "token"
    denominator_tokens: Annotated[
        int | None,
        "what a step's loss is divided by; null: the sum of its weights, so that it is a mean; a number: that many tokens a "
        "rollout of the step's groups, so that a token weighs the same in every step (Dr. GRPO, with the longest that an "
        "answer may be)",
        AtLeast(1),
    ] = None
    drop_equal_groups: Annotated[bool, "discard groups whose rewards are all equal and sample others instead"] = False
    mask_cut: Annotated[bool, "rollouts cut at the token limit do not train"] = False
    too_old: Annotated[
        Literal["drop", "mask", "train"],
        "what becomes of groups with tokens over the lag limit: drop: discarded whole; mask: those tokens do not train; train: "
        "they train all the same, with their true lag, and are counted",
    ] = "drop"
    pack_tokens: Annotated[int, "tokens of one micro-batch of one trainer rank; longer rollouts are discarded", AtLeast(1)] = (
        8192
    )
    processes: Annotated[
        int, "with more than 1, so many worker processes build step files, as many steps at once", AtLeast(1), Below(10**4)
    ] = 1
    memory_mib: Annotated[
        int,
        "waiting rollouts that are kept in memory; beyond it (with more than 1 process, always) their files are read again "
        "when their step is built",
        AtLeast(0),
    ] = 512
