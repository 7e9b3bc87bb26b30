"""How trainer ranks share a model: its tensors, layers, sequences and experts. Pure arithmetic."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from prl.config.hf_config import ModelConfig
from prl.trainer.options import TrainOptions


@dataclass(frozen=True)
class Layout:
    """Ranks are tensor-parallel to their neighbours; stages of the pipeline lie farthest apart; between them come context and
    data parallelism. Experts are dealt to the ranks of one stage, whatever else these share."""

    tensor: int
    pipeline: int
    virtual: int  # chunks of layers on each stage
    context: int
    expert: int

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model together (of a mixture of experts: of all but the experts)."""
        return self.tensor * self.context * self.pipeline

    @property
    def unit(self) -> int:
        """All trainer ranks are a multiple of this."""
        return self.pipeline * math.lcm(self.tensor * self.context, self.expert)

    def describe(self, ranks: int) -> str:
        """Of a trainer with so many ranks."""
        turns = f" in {self.virtual} turns" if self.virtual > 1 else ""
        parts = {"pipeline": f"{self.pipeline}{turns}", "context": f"{self.context}"}
        between = [f"{name} parallel {size}" for name, size in parts.items() if size != "1"]
        text = " x ".join([f"tensor parallel {self.tensor}", *between, f"data parallel {ranks // self.model_ranks}"])
        return f"{text}, expert parallel {self.expert}" if self.expert > 1 else text


def layout_of(train: TrainOptions) -> Layout:
    return Layout(
        tensor=train.tensor_parallel,
        pipeline=train.pipeline_parallel,
        virtual=train.virtual_pipeline,
        context=train.context_parallel,
        expert=train.expert_parallel,
    )


def layout_problems(train: TrainOptions, model: ModelConfig | None) -> Iterator[str]:
    """What keeps a model from being laid out so, but for its tensor parallelism (see `tensor_misfit`); a model that is not
    known is left out of account."""
    if train.sequence_parallel and train.tensor_parallel == 1:
        yield "train.sequence_parallel = true: needs train.tensor_parallel above 1; switch it off"
    if train.virtual_pipeline > 1 and train.pipeline_parallel == 1:
        yield f"train.virtual_pipeline = {train.virtual_pipeline}: needs train.pipeline_parallel above 1; set it to 1"
    if model is None:
        return
    chunks = train.pipeline_parallel * train.virtual_pipeline
    if model.layers % chunks:
        fitting = [str(n) for n in range(1, model.layers + 1) if model.layers % n == 0]
        yield (
            f"train.pipeline_parallel = {train.pipeline_parallel}: with train.virtual_pipeline = {train.virtual_pipeline} does "
            f"not divide the model's {model.layers} layers; their product must be one of {', '.join(fitting)}"
        )
    if not model.experts:
        if train.lora_rank > (width := min(model.hidden_size, model.heads * model.head_dim, model.ffn_size)):
            yield (
                f"train.lora_rank = {train.lora_rank}: is above the width of the model's narrowest layer, {width}, where an "
                f"adapter is larger than what it adapts; choose a low one, e.g. 16, or 0 to train all weights"
            )
        if train.expert_parallel > 1:
            yield f"train.expert_parallel = {train.expert_parallel}: the model has no experts; set it to 1"
        return
    if train.lora_rank:
        yield f"train.lora_rank = {train.lora_rank}: adapters are for models without experts; set it to 0"
    if model.experts % train.expert_parallel:
        fitting = [str(n) for n in range(1, model.experts + 1) if model.experts % n == 0]
        yield (
            f"train.expert_parallel = {train.expert_parallel}: does not divide the model's {model.experts} experts; choose one "
            f"of {', '.join(fitting)}"
        )
    if train.tensor_parallel > 1 and not train.sequence_parallel:
        yield (
            f"train.tensor_parallel = {train.tensor_parallel}: a model with experts then needs train.sequence_parallel: true, "
            f"so that each token goes to its experts once"
        )


def context_problems(train: TrainOptions, model: ModelConfig | None, gpus_per_node: int) -> Iterator[str]:
    """What keeps ranks from sharing sequences. Their attention is Transformer Engine's, with keys and values that go round
    (ring attention, Liu et al. 2023, arXiv 2310.01889); which kernels it has for that decides."""
    if train.context_parallel == 1:
        return
    key = f"train.context_parallel = {train.context_parallel}"
    if not gpus_per_node:
        yield (
            f"{key}: a token's attention to those on other ranks is Transformer Engine's, which needs accelerators; set "
            f"cluster.gpus_per_node, or 1 here"
        )
    elif train.dtype != "bfloat16":
        yield f"{key}: Transformer Engine's attention over several ranks is for bfloat16; set train.dtype: bfloat16, or 1 here"
    if train.lora_rank:
        yield f"{key}: needs Transformer Engine, in whose layers there are no adapters; set train.lora_rank: 0, or 1 here"
    if model is not None and model.window:
        yield (
            f"{key}: Transformer Engine's attention over several ranks knows no window, which this model has; set 1, and "
            f"train.tensor_parallel or train.recompute against long sequences"
        )


def tensor_misfit(model: ModelConfig, width: int) -> str:
    """Why `width` tensor-parallel ranks cannot divide the model; empty where they can. A vocabulary is padded instead, and
    fewer key-value heads than ranks are shared by ranks that divide evenly among them."""
    if model.heads % width:
        return f"does not divide the model's {model.heads} query heads"
    if model.kv_heads % width and width % model.kv_heads:
        return f"neither divides the model's {model.kv_heads} key-value heads nor is a multiple of them"
    rows = (model.heads + 2 * model.kv_heads) * model.head_dim
    if rows % width:
        return f"does not divide the model's {rows} rows of queries, keys and values"
    if not model.experts and model.ffn_size % width:
        return f"does not divide the model's feed-forward width of {model.ffn_size}"
    return ""
