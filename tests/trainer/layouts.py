"""Tiny models and the layouts in which the worker trains them and the tests judge what came out."""

from trainer_data import BASE

from prl.config.hf_config import ModelConfig, model_config
from prl.trainer.options import TrainOptions

OPTIONS = TrainOptions(
    learning_rate=1e-3,
    # So large that rounding of gradients near nought, by which Adam divides, does not decide which way a weight goes.
    epsilon=1e-4,
    clip_grad=1e6,
    entropy_coefficient=0.01,
    kl_coefficient=0.1,
    weight_decay=0.01,
    reference="initial",
    peak_tflops=1.0,
)
TIED = model_config(BASE | {"model_type": "qwen3", "tie_word_embeddings": True})
EXPERTS = (
    BASE
    | {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_hidden_layers": 2}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
)
QWEN2 = {key: value for key, value in BASE.items() if key != "head_dim"} | {"model_type": "qwen2"}
BIASED = model_config(QWEN2 | {"tie_word_embeddings": False})
MODELS: dict[str, ModelConfig] = {
    "tied": TIED,
    "values": TIED,  # with a value head
    "biased": BIASED,
    "sequences": BIASED,  # with a loss of whole sequences
    "one_key": model_config(QWEN2 | {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "untied": model_config(BASE | {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 4}),
    "experts": model_config(EXPERTS),
    "routed": model_config(EXPERTS),  # tokens go to experts that were recorded
    "clipped": model_config(EXPERTS),  # by the norm of a gradient that lies on all ranks
    "deep_experts": model_config(EXPERTS | {"num_hidden_layers": 4, "tie_word_embeddings": True}),
}
SPLIT = {"tensor_parallel": 2, "sequence_parallel": True}
FOUR = {"tensor_parallel": 4, "sequence_parallel": True}  # more ranks than keys and values of most models
STAGES = {"pipeline_parallel": 2}
TURNS = STAGES | {"virtual_pipeline": 2}
PAIRS = {"expert_parallel": 2}
SHARED = {"distributed_optimizer": True}
HALF = {"dtype": "bfloat16"}
CONTEXT = {"context_parallel": 2}  # without Transformer Engine: see gathered_attention.py
SEQUENCES = {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.1, "sequence_mask_low": 0.9, "sequence_mask_high": 1.2}
CLIP = {"clip_grad": 0.1}
VALUES = {"value_head": True, "gae_gamma": 0.99, "gae_lambda": 0.9, "value_rate_factor": 10.0, "kl_place": "reward"}

# Ranks, then the model, then its layouts. Names say how the same sequences are packed: "merged" into one micro-batch, "idle"
# likewise, which leaves ranks none; "alone" into one each, which data-parallel ranks have unequally many of.
LAYOUTS: dict[int, dict[str, dict[str, dict[str, object]]]] = {
    1: {
        "tied": {
            "one": {},
            "one_merged": {},
            "one_alone": {},
            "one_recomputed": {"recompute": "full"},
            "one_half": HALF,
        },
        "untied": {"one": {}, "one_recomputed": {"recompute": "selective"}},
        "biased": {"one": {}},
        "one_key": {"one": {}},
        "experts": {"one": {}, "one_merged": {}, "one_recomputed": {"recompute": "selective"}},
        "clipped": {"one": CLIP},
        "deep_experts": {"one": {}},
        "routed": {"one": {}, "one_recomputed": {"recompute": "full"}, "one_half": HALF},
        "sequences": {"one": SEQUENCES},
        "values": {
            "one": VALUES,
            "one_merged": VALUES,
            "one_half": VALUES | HALF,
            "one_stopped": VALUES | {"value_stop_gradient": True},
            "one_slight": VALUES | {"value_coefficient": 1e-9},
        },
    },
    2: {
        "tied": {
            "tensor": {"tensor_parallel": 2},
            "sequence": SPLIT,
            "sequence_half": SPLIT | HALF,
            "stages": STAGES,
            "stages_merged": STAGES,
            "turns": TURNS,
            "data": {},
            "data_idle": {},
            "data_alone": {},
            "data_shared": SHARED,
            "context": CONTEXT,
            "context_merged": CONTEXT | {"recompute": "full"},
            "context_shared": CONTEXT | SHARED,
        },
        "untied": {"stages": STAGES},
        "biased": {"tensor": {"tensor_parallel": 2}, "sequence": SPLIT, "stages": STAGES, "data_shared": SHARED},
        "sequences": {"context": SEQUENCES | CONTEXT},
        "experts": {
            "sequence": SPLIT,
            "experts": PAIRS,
            "experts_recomputed": PAIRS | {"recompute": "full"},
            "experts_idle": PAIRS,
            "context_experts": CONTEXT | PAIRS,
            "sequence_experts": SPLIT | PAIRS,
        },
        "clipped": {
            "sequence": CLIP | SPLIT,
            "stages": CLIP | STAGES,
            "experts_shared": CLIP | PAIRS | SHARED,
        },
        "routed": {
            "sequence_experts": SPLIT | PAIRS,
            "experts_half": PAIRS | HALF,
            "sequence_experts_half": SPLIT | PAIRS | HALF,
            "stages_recomputed": STAGES | {"recompute": "full"},
            "data": {},
            "context": CONTEXT,
        },
        "values": {
            "tensor": VALUES | {"tensor_parallel": 2},
            "sequence": VALUES | SPLIT,
            "stages": VALUES | STAGES,
            "data_shared_idle": VALUES | SHARED,
            "context": VALUES | CONTEXT,
        },
    },
    4: {
        "tied": {
            "tensor": {"tensor_parallel": 4},
            "sequence_alone": FOUR,
            "tensor_data": {"tensor_parallel": 2},
            "tensor_stages": STAGES | {"tensor_parallel": 2},
            "sequence_stages": SPLIT | STAGES,
            "sequence_data_shared": SPLIT | SHARED,
            "sequence_data_alone": SPLIT,
            "stages_data_shared": STAGES | SHARED,
            "stages_data_idle": STAGES,
            "turns_data": TURNS,
            "four_stages_merged": {"pipeline_parallel": 4},
            "data": {},
            "data_shared_alone": SHARED,
            "half_shared": STAGES | SHARED | HALF,
            "sequence_context": SPLIT | CONTEXT,
            "stages_context": STAGES | CONTEXT,
            "context_data_shared": CONTEXT | SHARED,
            "context": {"context_parallel": 4},
        },
        "biased": {"tensor": {"tensor_parallel": 4}, "sequence": FOUR, "sequence_half": FOUR | HALF},
        "one_key": {"tensor": {"tensor_parallel": 4}, "sequence_recomputed": FOUR | {"recompute": "full"}},
        "sequences": {"context_data_idle": SEQUENCES | CONTEXT},
        "untied": {"four_stages": {"pipeline_parallel": 4}, "sequence": FOUR},
        "experts": {
            "experts": {"expert_parallel": 4},
            "experts_data_alone": PAIRS,
            "experts_data_shared": SHARED | PAIRS,
            "sequence": FOUR,
            "four_experts": FOUR | PAIRS,
            "sequence_experts": SPLIT | {"expert_parallel": 4},
            "stages_experts": STAGES | PAIRS,
            "all": SPLIT | STAGES | SHARED | PAIRS,
            "sequence_context_experts": SPLIT | CONTEXT | {"expert_parallel": 4},
        },
        "clipped": {"all": CLIP | SPLIT | STAGES | SHARED | PAIRS},
        "deep_experts": {"turns_experts": TURNS | PAIRS, "four_stages": {"pipeline_parallel": 4}},
        "routed": {"all_half": SPLIT | STAGES | SHARED | PAIRS | HALF},
        "values": {
            "sequence_turns": VALUES | SPLIT | TURNS,
            "sequence_data_shared": VALUES | SPLIT | SHARED,
            "sequence_context": VALUES | SPLIT | CONTEXT,
        },
    },
    8: {
        "tied": {
            "all": SPLIT | TURNS | SHARED,
            "all_merged": SPLIT | STAGES | {"recompute": "selective"},
            "all_alone": SPLIT | STAGES,
            "four": FOUR | STAGES,
            "four_data_shared": FOUR | SHARED,
        },
        "experts": {
            "all": SPLIT | STAGES | SHARED | PAIRS,
            "all_idle": SPLIT | STAGES | PAIRS,
            "four_experts": FOUR | {"expert_parallel": 4},
        },
        "deep_experts": {"all_alone": SPLIT | TURNS | SHARED | {"expert_parallel": 4}},
    },
}

# Models that four tensor-parallel ranks may share or not, by their query heads, key-value heads and feed-forward width.
SHAPES = {
    f"{heads} {kv_heads} {width}": model_config(
        BASE
        | {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 8}
        | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width}
    )
    for heads, kv_heads, width in (
        *((4, 4, 48), (4, 2, 48), (4, 1, 48), (8, 2, 48), (8, 8, 48), (12, 1, 48)),
        *((6, 2, 48), (9, 3, 48), (12, 3, 48), (12, 6, 48), (4, 2, 50)),
    )
}
