"""How much memory a trainer rank needs, from the model, the layout and the tokens of a micro-batch. No torch.

Parameters, gradients and the optimizer's state are counted as Megatron keeps them: parameters in train.dtype, gradients in
float32, AdamW's two moments in float32 and, where the parameters are in bfloat16, a float32 copy of them. The distributed
optimizer splits moments and copy over the ranks that hold the same parameters (ZeRO stage 1, Rajbhandari et al. 2020,
arXiv 1910.02054). With train.optimizer_offload all that is in the host's memory, and the gradient once more.

Activations follow Korthikanti et al. 2022, arXiv 2205.05198, section 4, with what this model keeps: per token and layer four
times the width (both norms' inputs and outputs), queries, keys and values before and after the rotary embedding with the
attention's output (fused attention keeps no scores), and four times the feed-forward width (gate, up, the activated gate, their
product); a token that goes to k experts has k times an expert's feed-forward width, and its states before and after each. Heads
and feed-forward widths are divided by the tensor parallelism, the rest only with sequence parallelism; tokens by the context
parallelism, without what fills sequences up for it. Of more tensor-parallel ranks than key-value heads each gathers, and keeps,
the queries, keys and values of all, of which it takes its own queries and the key and the value that go with them. A pipeline's
first stage holds as many micro-batches as there are stages (one-forward-one-backward schedule; with v turns (p - 1) / (p v)
more, ibid., section 4.2.3).

A checkpoint is written from a copy in the host's memory, of parameters, optimizer's state and proximal policy. Of ranks that
hold the same, the first one makes it; each copies its share of a distributed optimizer's state, with the parameters in float32,
but of a tensor that lies in several ranks' shares the first of them copies all.

Fragmentation, communication buffers and what torch and the kernels keep for themselves are not in it: leave some room.
"""

from dataclasses import asdict, dataclass

from prl.config.hf_config import ModelConfig
from prl.config.layout import Layout, layout_of
from prl.config.schema import Config
from prl.trainer.options import TrainOptions

_GIB = 1024**3
_FLOAT32 = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    frozen_copies: int  # the reference, the proximal policy
    activations: int
    logits: int
    sending: int  # between steps, in the place of the two above
    sent_before: int = 0  # the copy of the version that the next one is told by its difference to
    on_the_host: int = 0  # beside all these, in another memory

    @property
    def total(self) -> int:
        return self.between_steps + max(self.activations + self.logits, self.sending)

    @property
    def between_steps(self) -> int:
        """What is there at all times."""
        return self.parameters + self.gradients + self.optimizer + self.frozen_copies + self.sent_before


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank."""

    shared: int  # the same on all data-parallel ranks
    experts: int

    @property
    def all(self) -> int:
        return self.shared + self.experts


def rank_parameters(model: ModelConfig, layout: Layout, stage: int) -> RankParameters:
    """Parameters of a rank of pipeline stage `stage`, counted one by one."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = (queries + 2 * keys) // layout.tensor * (model.hidden_size + model.qkv_bias) + (
        queries // layout.tensor * model.hidden_size
    )
    norms = 2 * model.hidden_size + 2 * model.head_dim * model.qk_norm
    layers = model.layers // layout.pipeline
    experts = 0
    if model.experts:
        feed_forward = model.experts * model.hidden_size  # the router
        experts = layers * model.experts // layout.expert * 3 * model.hidden_size * model.expert_ffn_size
    else:
        feed_forward = 3 * model.hidden_size * (model.ffn_size // layout.tensor)
    shared = layers * (attention + norms + feed_forward)
    vocabulary = model.padded_vocabulary(layout.tensor) // layout.tensor * model.hidden_size
    first, last = stage == 0, stage == layout.pipeline - 1
    # A tied output layer is the embedding itself only where both are on one stage.
    shared += vocabulary * (first + (last and not (first and model.tied))) + model.hidden_size * last
    return RankParameters(shared, experts)


def rank_memory(
    model: ModelConfig, train: TrainOptions, ranks: int, tokens: int, stage: int, sent_bytes: int = 0, kept_bytes: int = 0
) -> RankMemory:
    """Of a rank of pipeline stage `stage`, of `ranks` in all, whose micro-batches have up to `tokens` tokens. A rank of the
    first stage gathers the whole model, `sent_bytes`, for the samplers, and the first one keeps `kept_bytes` of it; where none
    is gathered, each rank keeps so many."""
    layout = layout_of(train)
    held, new, trained = _all_parameters(model, train, layout, stage)
    each = _FLOAT32 if train.dtype == "float32" else 2
    state = 2 * _FLOAT32 + (_FLOAT32 if train.dtype != "float32" else 0)
    last = stage == layout.pipeline - 1
    optimized = _optimized(trained, train, ranks).all
    # Weights with their adapters, for the backward pass.
    merged = held.all if train.lora_rank and train.recompute != "full" else 0
    columns = model.padded_vocabulary(layout.tensor) // layout.tensor
    own_tokens = -(-tokens // layout.context)
    return RankMemory(
        parameters=(held.all + new) * each,
        gradients=trained.all * _FLOAT32,
        optimizer=0 if train.optimizer_offload else optimized * state,
        frozen_copies=held.all * each * ((train.reference == "initial") + (train.proximal == "previous")),
        activations=(_activations(model, train, layout, own_tokens, stage) + merged) * each,
        logits=last * 3 * min(train.head_chunk_mib * 2**20, own_tokens * columns * _FLOAT32),
        sending=sent_bytes if stage == 0 else 0,
        sent_before=kept_bytes if stage == 0 or not sent_bytes else 0,
        on_the_host=optimized * (state + _FLOAT32) if train.optimizer_offload else 0,
    )


def saved_bytes(model: ModelConfig, train: TrainOptions, ranks: int, rank: int) -> int:
    """Of the copy from which a rank writes its part of a checkpoint, as if tensors that lie in several ranks' shares of a
    distributed optimizer were copied in parts; 0 where others write all that it holds."""
    layout = layout_of(train)
    stage, place = divmod(rank, ranks // layout.pipeline)
    held, new, trained = _all_parameters(model, train, layout, stage)
    each = 2 if train.dtype == "bfloat16" else _FLOAT32
    copies = each * (1 + (train.proximal == "previous"))
    first, first_of_experts = place < layout.tensor, place < layout.expert
    saved = (held.shared * copies + new * each) * first + held.experts * copies * first_of_experts
    optimized = _optimized(trained, train, ranks)
    if train.distributed_optimizer:
        return saved + optimized.all * _saved_state(train)
    return saved + (optimized.shared * first + optimized.experts * first_of_experts) * _saved_state(train)


def saved_on_a_node(model: ModelConfig, train: TrainOptions, ranks: int, of_node: int) -> int:
    """Bytes of these copies on the node that has most of them, of nodes with `of_node` ranks each."""
    saved = [saved_bytes(model, train, ranks, rank) for rank in range(ranks)]
    fullest = max(sum(saved[first : first + of_node]) for first in range(0, ranks, of_node))
    if train.distributed_optimizer and of_node < ranks:  # a tensor may lie in shares of several nodes: the largest one
        fullest += model.padded_vocabulary(train.tensor_parallel) * model.hidden_size * _saved_state(train)
    return fullest


def size_in_words(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB / 10 else f"{count / 2**20:.1f} MiB"


def _all_parameters(
    model: ModelConfig, train: TrainOptions, layout: Layout, stage: int
) -> tuple[RankParameters, int, RankParameters]:
    """Of a rank: the model's, what adapters and a value head add, and those that are trained."""
    held = rank_parameters(model, layout, stage)
    adapters = _adapter_parameters(model, layout, train.lora_rank)
    new = adapters + model.hidden_size * (train.value_head and stage == layout.pipeline - 1)
    return held, new, RankParameters(new, 0) if adapters else RankParameters(held.shared + new, held.experts)


def _optimized(trained: RankParameters, train: TrainOptions, ranks: int) -> RankParameters:
    """Of the trained parameters those whose optimizer's state a rank holds."""
    if not train.distributed_optimizer:
        return trained
    layout = layout_of(train)
    shared, experts = (ranks // (split * layout.pipeline) for split in (layout.tensor, layout.expert))  # ranks that share
    return RankParameters(-(-trained.shared // shared), -(-trained.experts // experts))


def _saved_state(train: TrainOptions) -> int:
    """Bytes of a parameter's state in a checkpoint: two moments, and the float32 values of their own where these are."""
    return (3 if train.distributed_optimizer or train.dtype == "bfloat16" else 2) * _FLOAT32


def _adapter_parameters(model: ModelConfig, layout: Layout, rank: int) -> int:
    """Of the adapters of a rank: their inputs and outputs, of which one side is split over tensor-parallel ranks."""
    split = (2 * model.heads + 2 * model.kv_heads) * model.head_dim + 3 * model.ffn_size
    return model.layers // layout.pipeline * rank * (4 * model.hidden_size + split // layout.tensor)


def fullest_rank(
    model: ModelConfig, train: TrainOptions, ranks: int, tokens: int, sent_bytes: int = 0, kept_bytes: int = 0
) -> tuple[int, RankMemory]:
    """The pipeline stage with the rank that needs most, and what it needs."""
    sent = sent_bytes, kept_bytes
    stages = [rank_memory(model, train, ranks, tokens, stage, *sent) for stage in range(train.pipeline_parallel)]
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].total)
    return fullest, stages[fullest]


def microbatch_tokens(config: Config) -> int:
    """Of the largest micro-batch that a step can have."""
    run = config.run
    return min(config.preprocess.pack_tokens, run.groups_per_step * run.rollouts_per_group * config.sample.max_model_len)


def copies_versions(config: Config) -> bool:
    """Whether tensors are put together, cast or merged with adapters before any is sent, not sent from where they lie."""
    layout, train = layout_of(config.train), config.train
    split = layout.tensor * layout.pipeline * layout.expert > 1
    return config.weights.transport != "lanes" and bool(split or train.dtype != config.sample.dtype or train.lora_rank)


def gathered_bytes(config: Config, model: ModelConfig) -> int:
    """Of the whole model on its way to the samplers; nothing where ranks send their own parameters."""
    return _version_bytes(config, model) if copies_versions(config) else 0


def kept_bytes(config: Config, model: ModelConfig, ranks: int) -> int:
    """Of the copy of what was sent to the samplers last, on a rank that keeps one; nothing where no deltas are sent."""
    if not config.weights.delta or config.weights.transport == "filesystem":
        return 0
    version = _version_bytes(config, model)
    return -(-version // ranks) if config.weights.transport == "lanes" else version


def arriving_bytes(config: Config, model: ModelConfig) -> int:
    """Of a version beside the live one, on a worker of a sampler."""
    version = _version_bytes(config, model)
    return version if config.weights.transport == "gather" else version // config.sample.tensor_parallel


def bucket_bytes(config: Config, model: ModelConfig) -> int:
    """Of all buckets that a worker of a sampler takes while a version arrives; deltas take one more."""
    count = {"gather": 1, "lanes": 2, "filesystem": 0}[config.weights.transport]
    count += config.weights.delta and config.weights.transport != "filesystem"
    return min(count * config.weights.bucket_mib * 2**20, _version_bytes(config, model))


def describe_memory(
    model: ModelConfig, train: TrainOptions, ranks: int, tokens: int, sent_bytes: int = 0, kept_bytes: int = 0
) -> str:
    """The estimate for the fullest rank in a line or two."""
    stage, memory = fullest_rank(model, train, ranks, tokens, sent_bytes, kept_bytes)
    of_stage = f" of stage {stage}" if train.pipeline_parallel > 1 else ""
    parts = ", ".join(f"{name.replace('_', ' ')} {size_in_words(size)}" for name, size in asdict(memory).items() if size)
    return (
        f"  a trainer rank{of_stage} needs about {size_in_words(memory.total)}, beside buffers and fragments, for "
        f"micro-batches of {tokens} tokens:\n    {parts}"
    )


def describe_weights(model: ModelConfig, config: Config) -> str:
    """What a version of the weights takes on its way to the samplers, in memory and on disk, a line each."""
    version = _version_bytes(config, model)
    when = "while a sampler that came back gets its weights"
    besides = list[str]()
    match config.weights.transport:
        case "filesystem":
            when = "while each version is written"
        case "lanes":
            buckets = size_in_words(bucket_bytes(config, model))
            besides = [
                f"each trainer rank and each worker takes up to {buckets} of buffers besides",
                "where no lanes can be built and files are used, the first trainer rank gathers the whole version",
            ]
    keeps = config.weights.delta and config.weights.transport == "gather"
    more = "more at all times" if keeps else "more while one arrives"
    held = f"a sampler's worker holds {size_in_words(arriving_bytes(config, model))} {more}"
    if config.weights.staging == "chunked":
        held = "samplers stand still while it is written over the last one, bucket by bucket"
    return "\n    ".join(
        (
            f"  a version of the weights has {size_in_words(version)}",
            held,
            f"weights/ in the run folder needs up to {size_in_words(2 * version)} of disk {when}",
            f"whoever writes there needs {size_in_words(min(version, _GIB))} of the host's memory",
            *besides,
        )
    )


def _version_bytes(config: Config, model: ModelConfig) -> int:
    """Of the whole model as the samplers have it."""
    alone = Layout(tensor=1, pipeline=1, virtual=1, context=1, expert=1)
    return rank_parameters(model, alone, 0).all * (_FLOAT32 if config.sample.dtype == "float32" else 2)


def _activations(model: ModelConfig, train: TrainOptions, layout: Layout, tokens: int, stage: int) -> int:
    """Elements that are kept for the backward pass of so many tokens on the rank, at the moment when most are."""
    split = layout.tensor if train.sequence_parallel else 1
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = tokens * model.hidden_size // split
    attention = 2 * width + tokens * 3 * (queries + keys) // layout.tensor
    if layout.tensor > model.kv_heads:
        attention = 2 * width + tokens * (queries + 2 * keys + 2 * queries // layout.tensor + model.head_dim)
    if model.experts:
        routed = tokens // split * model.experts_per_token
        feed_forward = 2 * width + routed * (2 * model.hidden_size + 4 * model.expert_ffn_size)
    else:
        feed_forward = 2 * width + tokens * 4 * model.ffn_size // layout.tensor
    layers = model.layers // layout.pipeline
    in_flight = float(layout.pipeline - stage)
    if layout.virtual > 1:
        in_flight += (layout.pipeline - 1) / layout.virtual
    again = {"none": 0, "selective": feed_forward - width, "full": attention + feed_forward - width}[train.recompute]
    kept = attention + feed_forward - again
    last = tokens * model.hidden_size if stage == layout.pipeline - 1 else 0  # for the output layer, on every rank whole
    return int(layers * in_flight * kept) + again + last
