"""What a step tells about itself: sums and maxima over its trained tokens, reduced over the data-parallel ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from prl.metrics import names
from prl.trainer import device, losses
from prl.trainer.batch import Batch
from prl.trainer.objective import PARTS, Objective

_SUMS = (
    *("tokens", "entropy", "ratio", "ratio_square", "clipped", "masked", "difference", "k3", "lag", "kl", "compared"),
    *("value", "return", "return_square", "error", "error_square"),
    *(f"loss_{part}" for part in PARTS),
)
_MAXIMA = ("ratio", "difference", "lag")
_LARGEST_DIFFERENCE = 300.0  # of log-probs, so that the square of a ratio is finite in float64
_LEAST_VARIANCE = 1e-9  # of returns that are not all equal
_LAGS = 64  # lags that are counted one by one; the last count has all above


class Measures:
    """Collected micro-batch by micro-batch on the device; read once a step."""

    def __init__(self) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device.device())
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device.device())
        self._lags = torch.zeros(_LAGS, dtype=torch.float64, device=device.device())
        self._parts: tuple[str, ...] = ()
        self._on_samples = self._has_values = False
        self._coefficients: Mapping[str, float] = {}

    def add(self, batch: Batch, found: Objective, logprobs: Tensor, entropies: Tensor) -> None:
        """All per-token tensors are [T] of one micro-batch; tokens without weight do not count."""
        trained = batch.weights > 0
        pi, mu, lags = (x[trained] for x in (logprobs, batch.old_logprobs, batch.lags))
        difference = (pi.double() - mu.double()).clamp(-_LARGEST_DIFFERENCE, _LARGEST_DIFFERENCE)
        ratios = difference.exp()
        nought = torch.zeros((), device=pi.device)
        kl, compared = nought, nought
        if batch.reference_logprobs is not None:
            kl, compared = losses.divergence(pi, batch.reference_logprobs[trained]).sum(), trained.sum()
        values, returns = (nought, nought) if found.value is None else (x.detach()[trained].double() for x in found.value)
        sums = (
            trained.sum(),
            entropies[trained].sum(),
            ratios.sum(),
            ratios.square().sum(),
            found.clipped[trained].sum(),
            found.masked[trained].sum(),
            difference.abs().sum(),
            losses.divergence(mu, pi).sum(),
            lags.sum(),
            kl,
            compared,
            *(values.sum(), returns.sum(), returns.square().sum(), (returns - values).sum(), (returns - values).square().sum()),
            *(found.parts.get(part, nought).detach() for part in PARTS),
        )
        self._parts = tuple(part for part in PARTS if part in found.parts)
        self._on_samples, self._has_values = found.on_samples, found.value is not None
        self._coefficients = found.coefficients
        self._sums += torch.stack([x.double() for x in sums])
        self._lags += torch.bincount(lags.long().clamp(0, _LAGS - 1), minlength=_LAGS)
        if pi.numel():
            maxima = torch.stack([ratios.max(), difference.abs().max(), lags.max()]).double()
            torch.maximum(self._maxima, maxima, out=self._maxima)

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """The step's metrics over all ranks of `group`. Means are over trained tokens."""
        if group.size() > 1:
            dist.all_reduce(self._sums, group=group)
            dist.all_reduce(self._lags, group=group)
            dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX, group=group)
        total = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        largest = dict(zip(_MAXIMA, self._maxima.tolist(), strict=True))
        count = max(total["tokens"], 1.0)
        found = {
            names.LOSS: sum(total[f"loss_{part}"] for part in PARTS),
            **{f"{names.LOSS_PART_PREFIX}{part}": total[f"loss_{part}"] for part in self._parts},
            **{f"train/{name}": value for name, value in self._coefficients.items()},
            names.TOKENS: total["tokens"],
            names.ENTROPY: total["entropy"] / count,
        }
        if total["compared"]:  # tokens that a reference has judged
            found["train/kl"] = total["kl"] / total["compared"]
        if self._has_values:
            spread, left = (total[f"{x}_square"] / count - (total[x] / count) ** 2 for x in ("return", "error"))
            found["train/value_mean"] = total["value"] / count
            found["train/explained_variance"] = 1 - left / spread if spread > _LEAST_VARIANCE else 0.0
        if not self._on_samples:
            return found
        return {
            **found,
            names.ESS: losses.effective_sample_size(total["ratio"], total["ratio_square"], count),
            names.LAG_MEAN: total["lag"] / count,
            names.LAG_MAX: largest["lag"],
            "train/ratio_mean": total["ratio"] / count,
            "train/ratio_max": largest["ratio"],
            "train/clip_fraction": total["clipped"] / count,
            "train/mask_fraction": total["masked"] / count,
            # How far trainer and sampler are apart on the sampled tokens (lag included).
            "train/mismatch_mean_nats": total["difference"] / count,
            "train/mismatch_max_nats": largest["difference"],
            "train/mismatch_k3_nats": total["k3"] / count,
            **{f"{names.LAG_COUNT_PREFIX}{lag}": tokens for lag, tokens in enumerate(self._lags.tolist()) if tokens},
        }
