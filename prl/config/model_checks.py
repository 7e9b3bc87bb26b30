"""Checks of the model: its folder, and whether it fits the split over devices and the lengths."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from prl.config.hf_config import ModelConfig, UnsupportedModelError, model_config, new_model_config, read_model_config
from prl.config.hub import said_of_missing
from prl.config.layout import context_problems, layout_problems, tensor_misfit
from prl.config.model_files import tokenizer_problems, weight_problems
from prl.config.schema import Config
from prl.trainer.options import ModelOptions


def model_of(config: Config) -> ModelConfig | None:
    """The model that a configuration names; None where it cannot be known or trained."""
    return model_and_problems(config)[0]


def shape_problems(config: Config, model: ModelConfig | None) -> list[str]:
    """What keeps the model, as far as it is known, from being laid out over devices as the configuration says."""
    return [
        *layout_problems(config.train, model),
        *context_problems(config.train, model, config.cluster.gpus_per_node),
        *(_fit(config, model) if model is not None else ()),
    ]


def model_and_problems(config: Config) -> tuple[ModelConfig | None, list[str]]:
    """What the trainer makes of the model's config.json, or of what that will be, with the problems of the model's folder."""
    options = config.model
    if not options.path:
        if options.init == "random" and options.architecture is not None:
            return _random_model(options)
        if options.init == "random":
            return None, [
                "model.architecture = null: with init: random give an architecture, or a path with config and tokenizer"
            ]
        return None, ["model.path is empty: name a Hugging Face folder, or set model.init: random and model.architecture"]
    if options.architecture is not None:
        return None, [f"model.architecture = {options.architecture}: is for models without a path; remove it or model.path"]
    folder = Path(options.path)
    try:
        there, whole = folder.is_dir(), (folder / "config.json").is_file()
    except OSError as error:
        return None, [f"model.path = {folder}: {error.strerror}; have its owner permit it (chmod), or name another folder"]
    if not there:
        return None, [
            f"model.path = {folder}: no such folder, and {said_of_missing(str(folder))}; give the folder of a downloaded "
            "Hugging Face model, or the name of one in the cache (hf download ORG/NAME [--revision REVISION])"
        ]
    if not whole:
        return None, [f"model.path = {folder}: has no config.json; it must be a complete Hugging Face folder"]
    try:
        return read_model_config(folder), []
    except UnsupportedModelError as error:
        return None, [f"model.path = {folder}: prl cannot train this model: {error}"]


def model_file_problems(config: Config, model: ModelConfig | None) -> Iterator[str]:
    folder = Path(config.model.path)
    reachable = os.access(folder, os.R_OK | os.X_OK, effective_ids=True)  # else that is said already
    if config.model.path and config.model.architecture is None and reachable:
        weights = weight_problems(folder, model) if config.model.init == "pretrained" else []
        yield from (f"model.path = {folder}: {problem}" for problem in [*tokenizer_problems(folder), *weights])


def _random_model(options: ModelOptions) -> tuple[ModelConfig | None, list[str]]:
    names = {field.name: f"model.{field.name}" for field in dataclasses.fields(options)}
    try:
        return model_config(new_model_config(options, end=0, pad=0), names), []
    except UnsupportedModelError as error:
        return None, list(error.args)


def _fit(config: Config, model: ModelConfig) -> Iterator[str]:
    """Does the model fit the split and the lengths?"""
    for key, width in (
        ("train.tensor_parallel", config.train.tensor_parallel),
        ("sample.tensor_parallel", config.sample.tensor_parallel),
    ):
        misfit = tensor_misfit(model, width)
        if misfit:
            fitting = [str(n) for n in range(1, model.heads + 1) if not tensor_misfit(model, n)]
            yield f"{key} = {width}: {misfit}; choose one of {', '.join(fitting)}"
    if model.experts:
        yield from _sampled_experts(config, model)
    elif config.sample.record_routing:
        yield "sample.record_routing = true: the model has no experts; set it to false"
    if config.sample.max_model_len > model.max_positions:
        yield (
            f"sample.max_model_len = {config.sample.max_model_len}: the model has {model.max_positions} positions; lower it to "
            f"that"
        )


def _sampled_experts(config: Config, model: ModelConfig) -> Iterator[str]:
    """A sampler's workers share each expert; on CPUs vLLM computes with experts in tiles."""
    workers = config.sample.tensor_parallel
    if model.experts < workers or model.expert_ffn_size % workers:
        yield (
            f"sample.tensor_parallel = {workers}: samplers share {model.experts} experts, each {model.expert_ffn_size} wide; "
            f"choose at most {model.experts}, of which the width is a multiple"
        )
    elif not config.cluster.gpus_per_node and (model.hidden_size % 32 or model.expert_ffn_size // workers % 16):
        yield (
            f"model: without accelerators vLLM wants a hidden size that is a multiple of 32 and experts whose width is one of "
            f"16 on each worker; they are {model.hidden_size} and {model.expert_ffn_size // workers}"
        )
    if config.sample.quantization != "none" and not config.cluster.gpus_per_node:
        yield f"sample.quantization = {config.sample.quantization}: experts need accelerators for it; set it to none"
    if config.sample.record_routing and not config.cluster.gpus_per_node:
        yield "sample.record_routing = true: vLLM records no routing without accelerators; set it to false"
    if config.sample.record_routing and config.train.recompute == "selective" and config.train.pipeline_parallel > 1:
        yield (
            "sample.record_routing = true: with train.recompute = selective, stages of a pipeline would compute experts again "
            "with the routing of another micro-batch; set train.recompute to none or full"
        )
