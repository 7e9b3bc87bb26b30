"""The whole configuration: every part's options under one roof."""

from dataclasses import dataclass, field
from typing import Annotated

from prl.actor.options import ActorOptions
from prl.cluster.options import ClusterOptions
from prl.config.bounds import AlsoCalled
from prl.control.options import ControlOptions
from prl.domains.options import DomainOptions
from prl.metrics.options import MetricsOptions
from prl.orchestrator.options import RunOptions
from prl.preprocess.options import PreprocessOptions
from prl.sampler.options import SampleOptions
from prl.streams.options import StreamsOptions
from prl.trainer.options import ModelOptions, TrainOptions
from prl.verifier.options import VerifierOptions
from prl.weights.options import WeightsOptions


@dataclass(frozen=True, kw_only=True)
class Config:
    run: Annotated[RunOptions, "how long, how fresh, when to look, when to stop"] = field(default_factory=RunOptions)
    model: Annotated[ModelOptions, "the model"] = field(default_factory=ModelOptions)
    domains: Annotated[tuple[DomainOptions, ...], "the tasks that are trained on"] = ()
    train: Annotated[TrainOptions, "how it is trained"] = field(default_factory=TrainOptions)
    sample: Annotated[SampleOptions, "the samplers"] = field(default_factory=SampleOptions)
    actor: Annotated[ActorOptions, "the actors"] = field(default_factory=ActorOptions)
    verifier: Annotated[VerifierOptions, "the verifier service"] = field(default_factory=VerifierOptions)
    preprocess: Annotated[PreprocessOptions, "the preprocessor"] = field(default_factory=PreprocessOptions)
    weights: Annotated[WeightsOptions, "the weights' path to the samplers"] = field(default_factory=WeightsOptions)
    streams: Annotated[StreamsOptions, "rollout and step streams"] = field(default_factory=StreamsOptions)
    metrics: Annotated[MetricsOptions, "metrics"] = field(default_factory=MetricsOptions)
    control: Annotated[ControlOptions, "heartbeats and deadlines"] = field(default_factory=ControlOptions)
    cluster: Annotated[ClusterOptions, "where it runs", AlsoCalled("slurm")] = field(default_factory=ClusterOptions)
