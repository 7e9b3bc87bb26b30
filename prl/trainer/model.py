"""Megatron's GPT model for a Hugging Face config."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from prl.config.hf_config import ModelConfig
from prl.trainer import device
from prl.trainer.layers import PackedAttention, PackedRotary, RMSNorm
from prl.trainer.lora import add_adapters
from prl.trainer.options import TrainOptions
from prl.trainer.rotary import attention_scale, inverse_frequencies
from prl.trainer.routing import replay_routings
from prl.trainer.value_head import add_value_head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(model: ModelConfig, options: TrainOptions) -> TransformerConfig:
    """Raises ValueError where the heads do not divide by the tensor parallelism."""
    if model.heads % options.tensor_parallel:
        raise ValueError(
            f"train.tensor_parallel = {options.tensor_parallel} does not divide the model's {model.heads} attention heads"
        )
    dtype = DTYPES[options.dtype]
    on_cpu = device.initialises_on_cpu()
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        softmax_scale=attention_scale(model),
        window_size=(model.window - 1, 0) if model.window else None,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline if options.virtual_pipeline > 1 else None,
        variable_seq_lengths=options.pipeline_parallel > 1,
        batch_p2p_comm=options.virtual_pipeline == 1,  # of two stages in turns each is before and after the other
        moe_token_dispatcher_type="alltoall",  # the one that goes with this, even where there are no experts
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=1,  # an expert is whole on one rank
        context_parallel_size=options.context_parallel,
        sequence_parallel=options.sequence_parallel and options.tensor_parallel > 1,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,  # every weight is loaded or drawn by us, equally for any tensor parallelism
        # These need kernels that a CPU has not.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=device.has_transformer_engine(),
        persist_layer_norm=device.has_transformer_engine(),
        cross_entropy_loss_fusion=False,
        **_RECOMPUTE[options.recompute],
        **_experts(model),
    )


def _experts(model: ModelConfig) -> dict[str, Any]:
    if not model.experts:
        return {}
    return {
        "num_moe_experts": model.experts,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": not model.experts_weights_sum_to_one,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": device.has_transformer_engine(),
    }


def build_model(model: ModelConfig, options: TrainOptions) -> list[GPTModel | Float16Module]:
    """This rank's part of the model, with weights that still must be loaded: one chunk of layers a virtual pipeline stage. The
    first of all chunks takes one row of packed tokens, the last gives the logits [1, T, padded vocabulary / tensor_parallel].

    Process groups must be up.
    """
    config = transformer_config(model, options)
    return [_build_chunk(model, options, config, number) for number in range(options.virtual_pipeline)]


def _build_chunk(model: ModelConfig, options: TrainOptions, config: TransformerConfig, number: int) -> GPTModel | Float16Module:
    """The one place that names GPTModel, which Megatron means to replace."""
    virtual = number if options.virtual_pipeline > 1 else None
    gpt = GPTModel(
        config,
        _layers(config, virtual),
        vocab_size=model.padded_vocabulary(options.tensor_parallel),
        max_sequence_length=model.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        vp_stage=virtual,
    )
    if not device.has_transformer_engine():
        gpt.rotary_pos_emb = PackedRotary(
            kv_channels=model.head_dim, rotary_percent=1.0, use_cpu_initialization=config.use_cpu_initialization
        )
    gpt.rotary_pos_emb.inv_freq = inverse_frequencies(model).to(device.device())
    if model.experts:
        replay_routings(gpt)
    if options.lora_rank:
        add_adapters(gpt, options.lora_rank)
    if options.value_head and gpt.post_process:
        add_value_head(gpt)
    gpt.to(device.device())
    return Float16Module(config, gpt) if config.bf16 else gpt


def unwrap(model: Any) -> GPTModel:
    """The GPT model inside its wrappers for data parallelism and half precision."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _layers(config: TransformerConfig, virtual: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    if device.has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention
    inner = attention.submodules if hasattr(attention, "submodules") else attention.keywords["submodules"]
    inner.core_attention = PackedAttention
    if config.qk_layernorm:
        inner.q_layernorm = inner.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=virtual), layer_norm=RMSNorm
    )
