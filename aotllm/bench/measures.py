"""`Measures`: the figures of one run, from the records of its requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aotllm.bench.goodput import is_good
from aotllm.bench.record import RequestRecord
from aotllm.bench.statistics import Distribution

DEFAULT_PERCENTS = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True)
class Measures:
    """Rates are per second of `duration`; latencies are seconds, of the requests that succeeded."""

    duration: float
    completed: int
    failed: int
    input_tokens: int
    """Of prompts whose request succeeded; `prompts_measured` says whether the server has counted them"""
    output_tokens: int
    cached_tokens: int | None
    """Prompt tokens that the server's prefix cache had; None where it does not say"""
    prompts_measured: bool
    outputs_measured: bool
    latencies: Mapping[str, Distribution]
    """By name: ttft, tpot, itl, e2el"""
    goodput: float | None
    """None without objectives"""
    error_counts: Mapping[str, int]
    max_output_tokens_per_s: float
    """Most tokens that came within one second, of the seconds since the start"""
    max_concurrent_requests: int
    """Most requests that were under way at one moment"""
    client_lag: Distribution
    """How late requests were sent: large where the client is too slow for the load"""

    @classmethod
    def of(
        cls,
        records: Sequence[RequestRecord],
        started: float,
        duration: float,
        objectives: Mapping[str, float] | None = None,
        percents: Sequence[float] = DEFAULT_PERCENTS,
    ) -> Measures:
        """Figures of requests that have all ended."""
        done = [record for record in records if record.ok]
        ttfts = [record.ttft for record in done if record.ttft is not None]
        tpots = [record.tpot for record in done if record.tpot is not None]
        itls = [gap for record in done for gap in record.itls]
        e2els = [record.e2el for record in done if record.e2el is not None]
        cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
        samples = {"ttft": ttfts, "tpot": tpots, "itl": itls, "e2el": e2els}
        return cls(
            duration=duration,
            completed=len(done),
            failed=len(records) - len(done),
            input_tokens=sum(map(input_tokens, done)),
            output_tokens=sum(record.num_output_tokens for record in done),
            cached_tokens=sum(cached) if cached else None,
            prompts_measured=all(record.prompt_tokens is not None for record in done),
            outputs_measured=all(record.output_tokens is not None for record in done),
            latencies={name: Distribution.of(values, percents) for name, values in samples.items()},
            goodput=sum(is_good(r, objectives) for r in done) / duration if objectives and duration > 0 else None,
            error_counts=dict(Counter(r.error.error_kind for r in records if r.error is not None).most_common()),
            max_output_tokens_per_s=_peak_rate(records, started),
            max_concurrent_requests=_peak_concurrency(records),
            client_lag=Distribution.of([record.sent - record.due for record in records], percents),
        )

    @property
    def request_throughput(self) -> float:
        """Requests per second that succeeded."""
        return self._per_second(self.completed)

    @property
    def input_throughput(self) -> float:
        """Prompt tokens per second."""
        return self._per_second(self.input_tokens)

    @property
    def output_throughput(self) -> float:
        """Generated tokens per second."""
        return self._per_second(self.output_tokens)

    @property
    def total_throughput(self) -> float:
        """Prompt and generated tokens per second."""
        return self._per_second(self.input_tokens + self.output_tokens)

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the prompt tokens that the prefix cache had; None where the server does not say."""
        if self.cached_tokens is None:
            return None
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0

    def _per_second(self, count: float) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def input_tokens(record: RequestRecord) -> int:
    """As the server has counted, else what the prompt was made to have."""
    return record.wanted_input if record.prompt_tokens is None else record.prompt_tokens


def _peak_rate(records: Sequence[RequestRecord], started: float) -> float:
    arrivals = [arrival for record in records for arrival in record.token_arrivals()]
    if not arrivals:
        return 0.0
    times, tokens = np.asarray(arrivals, dtype=np.float64).T
    seconds = np.floor(times - started).astype(np.int64).clip(0)
    return float(np.bincount(seconds, weights=tokens).max())


def _peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """A request that ends at the very moment at which another one starts is not under way with it."""
    changes = [(record.sent, 1) for record in records]
    changes += [(math.inf if record.ended is None else record.ended, -1) for record in records]
    changes.sort()
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
