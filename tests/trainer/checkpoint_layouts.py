"""Models, options and splits with which the workers save and load checkpoints, and their tests judge what came out."""

from dataclasses import replace

from trainer_data import BASE

from prl.config.hf_config import ModelConfig, model_config
from prl.trainer.options import TrainOptions

PLAIN = TrainOptions(learning_rate=1e-3, clip_grad=1.0, weight_decay=0.01, warmup_steps=5)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
DENSE_CONFIG = BASE | {"model_type": "qwen3", "tie_word_embeddings": True}
MIXTURE_CONFIG = BASE | EXPERTS | {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_hidden_layers": 2}
CONFIGS = {  # the models' config.json
    "dense": DENSE_CONFIG,
    "proximal": DENSE_CONFIG,
    "value_head": DENSE_CONFIG,
    "half": DENSE_CONFIG,
    "experts": MIXTURE_CONFIG,
    "half_experts": MIXTURE_CONFIG,
}
MODELS: dict[str, ModelConfig] = {name: model_config(config) for name, config in CONFIGS.items()}
DENSE = MODELS["dense"]
# Bounds so near to the policy before that they hold often: it decides the loss.
RECENT = replace(PLAIN, loss="decoupled_ppo", clip_low=1e-3, clip_high=1e-3, proximal="previous")
VALUES = replace(PLAIN, value_head=True, gae_lambda=0.9)
HALF = replace(PLAIN, dtype="bfloat16")
OPTIONS = {
    "dense": PLAIN,
    "proximal": RECENT,
    "value_head": VALUES,
    "half": HALF,
    "experts": PLAIN,
    "half_experts": HALF,
}
# Of two ranks; those whose names end alike have optimizers of one kind, and may go on from each other's checkpoints.
SHARED = {"distributed_optimizer": True}
SPLIT = {"tensor_parallel": 2, "sequence_parallel": True}
STAGES = {"pipeline_parallel": 2}
CONTEXT = {"context_parallel": 2}  # without Transformer Engine: see gathered_attention.py
LAYOUTS = {
    "dense": {
        "tensor": {"tensor_parallel": 2},
        "stages": STAGES,
        "turns": STAGES | {"virtual_pipeline": 2},
        "data": {},
        "context": CONTEXT,
        "tensor_shared": SHARED | {"tensor_parallel": 2},
        "stages_shared": SHARED | STAGES,
        "data_shared": SHARED,
        "context_shared": SHARED | CONTEXT,
    },
    "proximal": {
        "tensor": {"tensor_parallel": 2},
        "turns": STAGES | {"virtual_pipeline": 2},
    },
    "value_head": {
        "tensor": SPLIT,
        "turns": STAGES | {"virtual_pipeline": 2},
        "stages_shared": SHARED | STAGES,
        "data_shared": SHARED,
    },
    "half": {
        "tensor": SPLIT,
        "turns": STAGES | {"virtual_pipeline": 2},
        "data": {},
        "tensor_shared": SHARED | SPLIT,
        "stages_shared": SHARED | STAGES,
        "data_shared": SHARED,
    },
    "experts": {
        "experts": {"expert_parallel": 2},
        "data": {},
        "experts_shared": SHARED | {"expert_parallel": 2},
        "data_shared": SHARED,
    },
    "half_experts": {
        "experts": {"expert_parallel": 2},
        "tensor": SPLIT,
        "experts_shared": SHARED | {"expert_parallel": 2},
        "tensor_experts_shared": SHARED | SPLIT | {"expert_parallel": 2},
        "stages_shared": SHARED | STAGES,
    },
}
# Of four ranks, along two axes and more.
PAIRS = {"expert_parallel": 2}
TURNS = STAGES | {"virtual_pipeline": 2}
RESHARDED = {
    "dense": {
        "sequence_stages": SPLIT | STAGES,
        "data": {},
    },
    "half": {
        "data_shared": SHARED,
        "sequence_data_shared": SHARED | SPLIT,
        "sequence_turns_shared": SHARED | SPLIT | TURNS,
    },
    "experts": {
        "sequence_experts": SPLIT | PAIRS,
        "four_experts": {"expert_parallel": 4},
    },
    "half_experts": {
        "sequence_experts_shared": SHARED | SPLIT | PAIRS,
        "stages_experts_shared": SHARED | STAGES | PAIRS,
        "four_experts_shared": SHARED | {"expert_parallel": 4},
    },
}


def origins(model: str, layout: str) -> list[tuple[int, str]]:
    """Ranks and layout of the checkpoints from which this layout goes on: its own, its neighbour's, and one rank's."""
    shared = layout.endswith("_shared")
    kin = [other for other in LAYOUTS[model] if other.endswith("_shared") is shared]
    neighbour = kin[(kin.index(layout) + 1) % len(kin)]
    return [(2, layout), (2, neighbour), (1, "one_shared" if shared else "one")]


def reshardings(model: str) -> list[tuple[str, str]]:
    """Of four ranks, each layout and the other one from whose checkpoint it goes on: the one before it, or the last."""
    layouts = list(RESHARDED[model])
    return list(zip(layouts, layouts[-1:] + layouts[:-1], strict=True))
