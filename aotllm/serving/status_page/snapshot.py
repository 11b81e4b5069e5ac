"""`Snapshot`: the metrics of a server at one moment, all models together."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from aotllm.serving.telemetry.request_metrics import PREFIX

# JSON name -> metric
COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "requests": "request_success_total",
    "errors": "request_errors_total",
    "preemptions": "num_preemptions_total",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
}
GAUGES = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_used": "kv_blocks_used",
    "kv_total": "kv_blocks_capacity",
}
HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
}

Buckets = Mapping[float, float]
"""Upper bound -> how many values were at most that"""


@dataclass(frozen=True)
class Snapshot:
    """Sums over models; counters and buckets count from the start of the server."""

    time: float
    """Seconds since 1970"""
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Buckets] = field(default_factory=dict)

    @classmethod
    def of(cls, families: Iterable[Metric], time: float) -> Snapshot:
        """From the metrics as they are exposed."""
        counters, gauges = dict.fromkeys(COUNTERS, 0.0), dict.fromkeys(GAUGES, 0.0)
        histograms: dict[str, dict[float, float]] = {name: {} for name in HISTOGRAMS}
        counter_of = {PREFIX + metric: name for name, metric in COUNTERS.items()}
        gauge_of = {PREFIX + metric: name for name, metric in GAUGES.items()}
        bucket_of = {f"{PREFIX}{metric}_bucket": name for name, metric in HISTOGRAMS.items()}
        for family in families:
            for sample in family.samples:
                if sample.name in counter_of:
                    counters[counter_of[sample.name]] += sample.value
                elif sample.name in gauge_of:
                    gauges[gauge_of[sample.name]] += sample.value
                elif sample.name in bucket_of:
                    buckets, bound = histograms[bucket_of[sample.name]], float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
        return cls(time, counters, gauges, histograms)


def increase(now: float, before: float) -> float:
    """Of a counter. One that has fallen was reset: its engine was loaded again."""
    return now - before if now >= before else now


def bucket_increase(now: Buckets, before: Buckets) -> dict[float, float]:
    """`increase` of each bucket."""
    return {bound: increase(count, before.get(bound, 0.0)) for bound, count in now.items()}


def quantile(q: float, buckets: Buckets) -> float | None:
    """The value below which the share `q` of all values is, taken as spread evenly within a bucket, as PromQL's
    histogram_quantile does. None without values; the largest finite bound where it is beyond that."""
    bounds: Sequence[float] = sorted(buckets)
    counts = [buckets[bound] for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    index = bisect_left(counts, rank)
    if math.isinf(bounds[index]):
        return bounds[index - 1] if index else None
    low, below = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    inside = counts[index] - below
    return low + (bounds[index] - low) * ((rank - below) / inside if inside else 1.0)
