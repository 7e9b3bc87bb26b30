"""What Hugging Face's own model answers, to compare a sampler's answers with."""

import torch
from lab import Lab
from tiny_models import weights_of
from transformers import DynamicCache, Qwen2ForCausalLM

PROMPT = [3, 1, 9, 4, 10]
LONG = 900


def greedy(models: dict[str, Qwen2ForCausalLM], choice: dict, prompt: list[int], *, recompute: bool = False) -> list[int]:
    """What Hugging Face would say next at every token of an answer: each span by its own weights, over the cache that the
    earlier ones left, or with `recompute` over one computed anew. It equals the answer where the answer is greedy."""
    ids = prompt + choice["token_ids"]
    cache, done, out = DynamicCache(), 0, []
    for span in choice["weight_versions"]:
        if recompute:
            cache, done = DynamicCache(), 0
        until = len(prompt) + span["end"] - 1  # what is fed before the span's last token is sampled
        with torch.no_grad():
            output = models[span["version"]](input_ids=torch.tensor([ids[done:until]]), past_key_values=cache, use_cache=True)
        out += output.logits[0, span["start"] - span["end"] :].argmax(-1).tolist()
        done = until
    return out


def logprobs(model: Qwen2ForCausalLM, prompt: list[int], ids: list[int]) -> list[float]:
    """What Hugging Face says of the tokens of an answer."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def greedy_answer(model: Qwen2ForCausalLM, prompt: list[int], tokens: int) -> list[int]:
    """Hugging Face's own, token by token."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def during_updates(
    lab: Lab, models: list[Qwen2ForCausalLM], prompt: list[int], *, clear_cache: bool = False, ask=None, **sampling
):
    """A reply in flight over three updates, or as many as begin before it ends, and the models by their labels."""
    labels = {f"0:{lab.step}": models[0]}
    reply = (ask or lab.generate)(prompt, max_tokens=LONG, ignore_eos=True, **sampling)
    for model in models[1:4]:
        if reply.done():
            break
        lab.update(weights_of(model), clear_cache=clear_cache)
        labels[f"0:{lab.step}"] = model
    return reply.result(60).body, labels
