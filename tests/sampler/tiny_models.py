"""Models small enough to be compared token by token with Hugging Face's, and their weights as a trainer names them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

torch.set_num_threads(1)  # the sampler needs a core too
EOS = 11
Weights = dict[str, torch.Tensor]


def tiny_model(seed: int, *, tied: bool = True, vocabulary: int = 16) -> Qwen2ForCausalLM:
    """The digits model, with weights large enough that every greedy choice depends on all that came before."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=12,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
            elif seed:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def one_word_model(token: int, seed: int, **like: Any) -> Qwen2ForCausalLM:
    """A `tiny_model` that says this token whatever it is asked: its layers add little to the direction that all embeddings
    share, and the head's row of the token lies along that. All of its tensors depend on the seed."""
    model = tiny_model(seed, **like)
    with torch.no_grad():
        direction = torch.full((model.config.hidden_size,), 2.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        model.model.embed_tokens.weight.add_(direction)
        model.lm_head.weight[token].add_(direction)
        model.model.norm.weight.fill_(1.0)
    return model


def tiny_experts(seed: int, width: int = 48) -> Qwen3MoeForCausalLM:
    """Two of four experts a token, far apart; a width of 48 is a multiple of vLLM's tiles on CPUs, but is padded to 64."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=width,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=12,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def weights_of(model: PreTrainedModel) -> Weights:
    """Under the names that files have, a tied head once; transformers itself holds the experts of a layer in one tensor."""
    found: Weights = {}
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        if not path.endswith(".experts"):
            found[name] = parameter.detach()
            continue
        for number, expert in enumerate(parameter.detach()):
            parts = dict(zip(("gate", "up"), expert.chunk(2), strict=True)) if last == "gate_up_proj" else {"down": expert}
            found |= {f"{path}.{number}.{part}_proj.weight": tensor for part, tensor in parts.items()}
    return found


def save(model: PreTrainedModel, folder: Path) -> None:
    """Config and tokenizer alone: a sampler starts without weights."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    vocabulary = {character: number for number, character in enumerate("0123456789=")} | {"<eos>": EOS, "<pad>": 12}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
