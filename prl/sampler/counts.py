"""What vLLM counts by itself (as /metrics shows it), for this sampler's metrics."""

from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

from prl.metrics import names

_NAMES = {
    "vllm:num_requests_running": names.ENGINE_RUNNING,
    "vllm:num_requests_waiting": names.ENGINE_WAITING,
    "vllm:kv_cache_usage_perc": names.KV_CACHE_SHARE,  # 1 is all of it
    "vllm:num_preemptions": names.PREEMPTIONS,
    "vllm:prompt_tokens": names.PROMPT_TOKENS,
    "vllm:generation_tokens": names.GENERATED_TOKENS,
}
_LOOKED_UP, _FOUND = "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"  # tokens


class EngineCounts:
    """Of the one engine of this process."""

    def __init__(self) -> None:
        self._looked_up = self._found = 0.0

    def look(self) -> dict[str, float]:
        """The values of an engine event. Without `prefix_hit_share` where no prompt was looked up since the last call."""
        counted = {one.name: float(one.value) for one in get_metrics_snapshot() if isinstance(one, Counter | Gauge)}
        values = {name: counted[theirs] for theirs, name in _NAMES.items()}
        looked_up, found = counted[_LOOKED_UP] - self._looked_up, counted[_FOUND] - self._found
        if looked_up:
            values[names.PREFIX_HIT_SHARE] = found / looked_up
        self._looked_up, self._found = counted[_LOOKED_UP], counted[_FOUND]
        return values
