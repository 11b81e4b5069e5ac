"""`BenchPoint`: one run with its load; as JSON with the key names of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aotllm.bench.arrivals import Arrivals
from aotllm.bench.load import LoadRun
from aotllm.bench.measures import Measures, input_tokens
from aotllm.bench.soak import SoakMonitor
from aotllm.bench.statistics import percent_name


@dataclass(frozen=True)
class BenchContext:
    """What all points of a sweep have in common."""

    backend: str
    url: str
    model: str
    workload: str
    """Profile or file"""
    lengths_by: str
    """How prompts came to their lengths"""
    tokenizer: str | None
    seed: int
    metrics: Sequence[str]
    """Latencies that are reported"""
    detailed: bool


@dataclass(frozen=True)
class BenchPoint:
    """One run."""

    context: BenchContext
    arrivals: Arrivals
    concurrency: int | None
    run: LoadRun
    measures: Measures
    date: datetime
    soak: SoakMonitor | None = None

    @property
    def load(self) -> str:
        """What tells this point from others: `rate 2`, `concurrency 8`."""
        parts = []
        ramp = self.arrivals.ramp_up
        if ramp is not None:
            parts.append(f"rate {ramp.start:g} … {ramp.end:g}")
        elif not math.isinf(self.arrivals.rate) or self.concurrency is None:
            parts.append(f"rate {self.arrivals.rate:g}")
        if self.concurrency is not None:
            parts.append(f"concurrency {self.concurrency}")
        return ", ".join(parts)

    def json(self) -> dict[str, Any]:
        """One object; times of `_ms` keys are milliseconds, others seconds."""
        value = self._head() | self._totals()
        if self.context.detailed:
            value |= self._details()
        for name in self.context.metrics:
            distribution = self.measures.latencies[name]
            value |= {
                f"mean_{name}_ms": distribution.mean * 1000,
                f"median_{name}_ms": distribution.median * 1000,
                f"std_{name}_ms": distribution.std * 1000,
            }
            value |= {f"{percent_name(p)}_{name}_ms": v * 1000 for p, v in distribution.percentiles}
        if self.soak is not None:
            value["soak"] = self.soak.json()
        return value

    def _head(self) -> dict[str, Any]:
        context, arrivals, measures = self.context, self.arrivals, self.measures
        head = {
            "date": self.date.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": context.backend,
            "backend": context.backend,
            "url": context.url,
            "label": self.load,
            "model_id": context.model,
            "tokenizer_id": context.tokenizer or context.model,
            "workload": context.workload,
            "prompt_lengths": context.lengths_by,
            "seed": context.seed,
            "num_prompts": measures.completed + measures.failed,
            "num_conversations": self.run.conversations,
            "request_rate": _finite(arrivals.rate),
            "burstiness": _finite(arrivals.burstiness),
            "max_concurrency": self.concurrency,
        }
        if arrivals.ramp_up is not None:
            ramp = arrivals.ramp_up
            head["ramp_up_strategy"] = "exponential" if ramp.exponential else "linear"
            head["ramp_up_start_rps"], head["ramp_up_end_rps"] = ramp.start, ramp.end
        return head

    def _totals(self) -> dict[str, Any]:
        measures, run = self.measures, self.run
        lag = dict(measures.client_lag.percentiles)
        return {
            "duration": measures.duration,
            "completed": measures.completed,
            "failed": measures.failed,
            "cancelled": run.cancelled,
            "skipped": run.skipped,
            "interrupted": run.interrupted,
            "error_counts": dict(measures.error_counts),
            "total_input_tokens": measures.input_tokens,
            "total_output_tokens": measures.output_tokens,
            "total_cached_tokens": measures.cached_tokens,
            "prefix_hit_rate": measures.prefix_hit_rate,
            "input_tokens_measured": measures.prompts_measured,
            "output_tokens_measured": measures.outputs_measured,
            "request_throughput": measures.request_throughput,
            "request_goodput": measures.goodput,
            "output_throughput": measures.output_throughput,
            "total_token_throughput": measures.total_throughput,
            "max_output_tokens_per_s": measures.max_output_tokens_per_s,
            "max_concurrent_requests": measures.max_concurrent_requests,
            "client_lag_ms": {percent_name(p): v * 1000 for p, v in lag.items()},
        }

    def _details(self) -> dict[str, Any]:
        """Lists with an entry per request, in the order of sending; 0 where a failed one has no value."""
        records = self.run.records
        return {
            "start_times": [record.sent - self.run.started for record in records],
            "input_lens": [input_tokens(record) for record in records],
            "output_lens": [record.num_output_tokens for record in records],
            "wanted_input_lens": [record.wanted_input for record in records],
            "wanted_output_lens": [record.wanted_output for record in records],
            "ttfts": [record.ttft or 0.0 for record in records],
            "itls": [record.itls for record in records],
            "e2els": [record.e2el or 0.0 for record in records],
            "generated_texts": [record.text for record in records],
            "errors": [record.error.message if record.error is not None else "" for record in records],
        }


def _finite(value: float) -> float | str:
    """JSON has no infinity; `vllm bench serve` writes it as a string."""
    return "inf" if math.isinf(value) else value
