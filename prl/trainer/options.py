"""Options of the model and of its training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from prl.config.bounds import Above, AtLeast, AtMost, Below


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    path: Annotated[
        str,
        "Hugging Face folder with config, tokenizer and (unless init is random) weights; or a model's name on the hub, e.g. "
        "Qwen/Qwen2.5-7B or with @REVISION, where it lies in the cache of prl-submit's machine",
    ] = ""
    init: Annotated[Literal["pretrained", "random"], "pretrained: weights of `path`; random: drawn from run.seed"] = (
        "pretrained"
    )
    architecture: Annotated[
        Literal["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"] | None,
        "with init: random and no path, submission writes a model folder of this architecture and the sizes below",
    ] = None
    tokenizer: Annotated[Literal["digits", "bytes"], "tokenizer written beside such a model"] = "digits"
    hidden_size: Annotated[int, "width of such a model", AtLeast(1), Below(10**6)] = 64
    layers: Annotated[int, "layers of such a model", AtLeast(1), Below(10**5)] = 2
    heads: Annotated[int, "query heads of such a model", AtLeast(1), Below(10**5)] = 2
    kv_heads: Annotated[int, "key and value heads of such a model", AtLeast(1), Below(10**5)] = 1
    head_dim: Annotated[int, "width of a head of such a model", AtLeast(1), Below(10**5)] = 32
    ffn_size: Annotated[int, "width of the feed-forward layer of such a model", AtLeast(1), Below(10**7)] = 256
    experts: Annotated[int, "experts in the place of that layer (qwen3_moe)", AtLeast(2), Below(10**5)] = 8
    experts_per_token: Annotated[int, "experts that a token goes through (qwen3_moe)", AtLeast(2), Below(10**5)] = 2
    expert_ffn_size: Annotated[int, "width of an expert (qwen3_moe)", AtLeast(1), Below(10**7)] = 64
    tied: Annotated[bool, "such a model's output layer is its embedding"] = True
    max_positions: Annotated[int, "longest sequence of such a model, in tokens", AtLeast(1), Below(10**8)] = 1024


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    tensor_parallel: Annotated[int, "tensor-parallel ranks of the trainer", AtLeast(1), Below(10**4)] = 1
    sequence_parallel: Annotated[bool, "split norms and activations along the sequence over the tensor-parallel ranks"] = False
    pipeline_parallel: Annotated[
        int, "pipeline stages of the trainer, each with as many of the model's layers", AtLeast(1), Below(10**4)
    ] = 1
    virtual_pipeline: Annotated[
        int,
        "chunks of layers on each pipeline stage, dealt in turns: less idle time, more messages; above 1 it needs stages",
        AtLeast(1),
        Below(10**4),
    ] = 1
    expert_parallel: Annotated[
        int,
        "ranks that share a layer's experts, each expert being whole on one; for mixtures of experts",
        AtLeast(1),
        Below(10**4),
    ] = 1
    context_parallel: Annotated[
        int,
        "ranks that share the tokens of each sequence; above 1: with accelerators, Transformer Engine and dtype: bfloat16",
        AtLeast(1),
        Below(10**4),
    ] = 1
    distributed_optimizer: Annotated[
        bool, "split the optimizer's state over the data-parallel ranks instead of keeping all of it on each"
    ] = False
    optimizer_offload: Annotated[
        bool,
        "keep the optimizer's state and its float32 copy of the parameters in the host's memory, where its processors update "
        "them: 12 bytes a parameter less on the accelerator, 16 more on the host; for accelerators, with distributed_optimizer "
        "and dtype: bfloat16",
    ] = False
    dtype: Annotated[Literal["float32", "bfloat16"], "dtype of the trained parameters (the optimizer's are float32)"] = (
        "float32"
    )
    threads: Annotated[int, "CPU threads of a trainer rank", AtLeast(1), Below(10**4)] = 1
    yields_cpu: Annotated[
        bool,
        "without accelerators, on a node with samplers: trainer ranks leave a core to whoever else wants it (SCHED_IDLE, and a "
        "low weight of their session), which keeps the samplers' pause at an update short",
    ] = True
    learning_rate: Annotated[float, "AdamW's learning rate after the warm-up", AtLeast(0)] = 1e-6
    warmup_steps: Annotated[int, "steps over which the learning rate rises linearly", AtLeast(0)] = 0
    schedule: Annotated[
        Literal["constant", "cosine", "linear"],
        "after the warm-up the learning rate stays, or falls along half a cosine or a line to min_learning_rate",
    ] = "constant"
    schedule_steps: Annotated[
        int | None, "step at which a falling rate reaches min_learning_rate, where it stays; null: run.steps", AtLeast(1)
    ] = None
    min_learning_rate: Annotated[float, "where a falling learning rate ends", AtLeast(0)] = 0.0
    beta1: Annotated[float, "AdamW's first decay", AtLeast(0), Below(1)] = 0.9
    beta2: Annotated[float, "AdamW's second decay", AtLeast(0), Below(1)] = 0.95
    epsilon: Annotated[float, "AdamW's epsilon", Above(0)] = 1e-8
    weight_decay: Annotated[float, "AdamW's weight decay", AtLeast(0)] = 0.0
    clip_grad: Annotated[float, "largest global gradient norm; 0: no clipping", AtLeast(0)] = 1.0
    max_skipped_steps: Annotated[
        int,
        "steps in a row that may leave the weights as they are because their gradient is not finite; one more ends the run",
        AtLeast(0),
    ] = 10
    loss: Annotated[
        Literal["ppo", "reinforce", "gspo", "cispo", "dppo_tv", "decoupled_ppo", "sft"],
        "ppo: clipped ratio; reinforce: truncated importance weights on REINFORCE; gspo: clipped ratio of the whole sequence; "
        "cispo: importance weights bounded on both sides on REINFORCE; dppo_tv: tokens whose probability has moved too far are "
        "left out; decoupled_ppo: clipped ratio to a recent policy, truncated importance weight from there to the sampler's; "
        "sft: cross-entropy of the answers, whatever their rewards",
    ] = "ppo"
    clip_low: Annotated[
        float | None,
        "lower clip distance of the ratio from 1 (dppo_tv: of the probability from the sampler's); null: ppo, decoupled_ppo "
        "and dppo_tv 0.2, gspo 3e-4, cispo 1",
        AtLeast(0),
        AtMost(1),
    ] = None
    clip_high: Annotated[
        float | None,
        "upper clip distance, likewise; null: ppo, decoupled_ppo and dppo_tv 0.2, gspo 4e-4, cispo 4",
        AtLeast(0),
    ] = None
    truncate: Annotated[float | None, "largest importance weight (reinforce, decoupled_ppo); null: 5", Above(0)] = None
    ratio_penalty: Annotated[float | None, "weight of the squared log ratio (dppo_tv); null: 1e-3", AtLeast(0)] = None
    proximal: Annotated[
        Literal["interpolated", "previous"] | None,
        "policy that limits a step (decoupled_ppo); interpolated: that of one step before as estimated from the trainer's and "
        "the sampler's; previous: that itself, of which each trainer rank and each checkpoint keeps a copy (dtype's 2 or 4 "
        "bytes a parameter and one more forward pass); in a run's first step, and in the first one after a resume from a "
        "checkpoint without it, the trainer's own; null: interpolated",
    ] = None
    value_head: Annotated[
        bool,
        "a linear value head on the model's last hidden states, trained with the model and from 0 on: advantages are those of "
        "generalized advantage estimation (GAE) with its values; needs preprocess.advantage: reward",
    ] = False
    gae_gamma: Annotated[float, "discount of rewards, a token (value_head)", AtLeast(0), AtMost(1)] = 1.0
    gae_lambda: Annotated[
        float,
        "GAE's lambda (value_head): below 1 advantages vary less but have the faults of the values, and a reward at the end "
        "fades on its way to the first tokens of long answers",
        AtLeast(0),
        AtMost(1),
    ] = 1.0
    value_coefficient: Annotated[
        float, "weight of the value loss, half the squared distance of value and return (value_head)", Above(0)
    ] = 0.5
    value_stop_gradient: Annotated[
        bool, "the value loss trains the value head alone and leaves the model as it is (value_head)"
    ] = False
    value_rate_factor: Annotated[
        float,
        "the value head's learning rate, as a multiple of learning_rate (value_head); where that is about 1e-6, 10 lets the "
        "head, which starts at 0, reach the rewards sooner",
        AtLeast(0),
    ] = 1.0
    token_mask_low: Annotated[
        float | None,
        "the policy's term of the loss leaves out tokens with a smaller ratio of trainer to sampler (the value head, entropy, "
        "divergence and ratio_penalty still train on them); null: no such bound",
        AtLeast(0),
    ] = None
    token_mask_high: Annotated[
        float | None, "likewise tokens with a larger ratio of trainer to sampler; null: no such bound", Above(0)
    ] = None
    sequence_mask_low: Annotated[
        float | None, "likewise sequences with a smaller geometric mean of the ratios; null: no such bound", AtLeast(0)
    ] = None
    sequence_mask_high: Annotated[
        float | None, "likewise sequences with a larger geometric mean of the ratios; null: no such bound", Above(0)
    ] = None
    entropy_coefficient: Annotated[float, "weight of the entropy bonus", AtLeast(0)] = 0.0
    entropy_coefficient_end: Annotated[
        float | None, "weight of the entropy bonus after coefficient_steps; null: it stays", AtLeast(0)
    ] = None
    kl_coefficient: Annotated[
        float, "weight of the divergence from the reference; above 0 it needs reference: initial", AtLeast(0)
    ] = 0.0
    kl_coefficient_end: Annotated[
        float | None, "weight of the divergence after coefficient_steps; null: it stays", AtLeast(0)
    ] = None
    kl_place: Annotated[
        Literal["loss", "reward"],
        "loss: the divergence of a token is part of its loss; reward: that from a token to the end of its sequence lowers the "
        "token's advantage",
    ] = "loss"
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"] | None,
        "estimate of the divergence, with x the reference's log-prob less the trainer's: k1: -x; k2: x^2 / 2; k3: e^x - x - 1; "
        "null: k3 in the loss, k1 in the reward",
    ] = None
    coefficient_steps: Annotated[
        int | None, "steps over which the two weights above go to their ends on a straight line", AtLeast(1)
    ] = None
    reference: Annotated[
        Literal["none", "initial"],
        "initial: measure the divergence from the initial policy, of which each trainer rank keeps a frozen copy (dtype's 2 or "
        "4 bytes a parameter and one more forward pass)",
    ] = "none"
    checkpoint_every_steps: Annotated[
        int,
        "steps between two checkpoints, which are written while training goes on, from a copy in each node's memory; 0: only "
        "the one at the end",
        AtLeast(0),
    ] = 0
    checkpoint_keep_last: Annotated[int | None, "newest checkpoints that are kept; null: all", AtLeast(1)] = None
    checkpoint_keep_every_steps: Annotated[
        int, "checkpoints of steps that this divides are kept besides; 0: none", AtLeast(0)
    ] = 0
    lora_rank: Annotated[
        int,
        "rank of adapters (LoRA) on attention and feed-forward layers, which alone are trained; samplers get the merged "
        "weights; learning rates are about 10 times those without. For dense models, and only where Transformer Engine is not "
        "installed. 0: all weights are trained",
        AtLeast(0),
        Below(10**5),
    ] = 0
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "activations computed again in the backward pass instead of being kept; selective: those of the feed-forward layers or "
        "experts, which are most; full: all but each layer's input",
    ] = "none"
    head_dtype: Annotated[
        Literal["same", "float32"],
        "dtype of the output layer's logits; same: dtype's, as the samplers'; float32: not rounded to it",
    ] = "same"
    head_chunk_mib: Annotated[
        int,
        "logits of a trainer rank that exist at once, in MiB of float32 (up to three buffers of that size are in use); fewer "
        "make smaller matrix products",
        AtLeast(1),
        Below(2**17),
    ] = 256
    peak_tflops: Annotated[
        float,
        "TFLOP/s that a trainer rank's accelerator has at most in dtype, of which train/mfu is a share; 0: for bfloat16 what "
        "is known of its name, otherwise no train/mfu",
        AtLeast(0),
    ] = 0.0


LOSS_SETTINGS: Mapping[str, Mapping[str, float]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "reinforce": {"truncate": 5.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "dppo_tv": {"clip_low": 0.2, "clip_high": 0.2, "ratio_penalty": 1e-3},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.2, "truncate": 5.0},
    "sft": {},
}
"""The options that are each loss's own, with what they are where they are not set."""


def loss_setting(options: TrainOptions, name: str) -> float:
    """An option of the chosen loss. Raises KeyError for one that it has not."""
    default = LOSS_SETTINGS[options.loss][name]
    value: float | None = getattr(options, name)
    return default if value is None else value
