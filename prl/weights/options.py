"""Options of the path from the trainer's weights to the samplers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from prl.config.bounds import Above, AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    transport: Annotated[
        Literal["gather", "lanes", "filesystem"],
        "gather: one trainer rank gathers each version and sends it over a collective group; lanes: every trainer rank sends "
        "its own part, and each worker of a sampler gets only what it holds (experimental over NCCL); filesystem: one rank "
        "writes files into weights/ of the run folder, which the samplers read. Where a group breaks again and again, files "
        "are used anyway",
    ] = "gather"
    staging: Annotated[
        Literal["auto", "full", "chunked"],
        "full: a version arrives beside the one that is sampled from, and takes its place in a short pause; chunked: where the "
        "samplers' memory does not allow that, they stand still while it arrives, and each bucket is written over the last "
        "version. Where none has come within group_s and update_s together they hand back what they were asked, and serve "
        "nothing until a whole version has come. auto: chunked where accelerators, as far as their memory is known, hold no "
        "second version beside what vLLM takes (sample.gpu_memory_utilization), and nothing else wants whole versions; else "
        "full. prl-submit settles it, --dry-run says why",
    ] = "auto"
    bucket_mib: Annotated[int, "size of one packed transfer, in MiB", AtLeast(1), Below(2**17)] = 256
    group_s: Annotated[float, "deadline of building the transfer group, in seconds", Above(0)] = 120.0
    update_s: Annotated[
        float, "deadline of each part of an update (offer, staging at all replicas, commit), in seconds", Above(0)
    ] = 120.0
    delta: Annotated[
        bool,
        "send only the values that changed since the version before. Costs a copy of what was sent, in sample.dtype, on the "
        "accelerator where there is one: with lanes each trainer rank keeps its part; with gather the first one keeps all of "
        "the model, and so does every worker of the samplers, at all times instead of during transfers alone",
    ] = False
    anchor_every_steps: Annotated[
        int,
        "with weights.delta: send all values again so many steps after they were last sent",
        AtLeast(1),
    ] = 100
    overlap: Annotated[
        bool,
        "send a version while the trainer computes the passes of the next step, which waits for it before its optimizer "
        "changes weights. Where tensors have to be put together, cast or merged with adapters to be sent, only with lanes. "
        "Never run over NCCL, where two communicators active on one accelerator may hold each other up until update_s has "
        "passed",
    ] = False
    prefix_cache: Annotated[
        Literal["salted", "keep", "recompute"],
        "what becomes of the samplers' KV cache at each new version. salted: requests in flight keep theirs, and later ones "
        "share prefixes with requests of their own version alone; keep: later ones also reuse prefixes that earlier versions "
        "computed, which saves work, but makes their log-probs those of no single version; recompute: the cache is emptied, "
        "and computed anew for requests in flight, too",
    ] = "salted"

    @property
    def stillness_s(self) -> float:
        """The longest that a sampler stands still for a version, with `staging: chunked`: as long as one may take to arrive."""
        return self.group_s + self.update_s
