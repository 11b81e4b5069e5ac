"""`RequestMetrics`: what is counted of requests where they are served."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, values

from aotllm.errors import ERROR_KINDS
from aotllm.serving.telemetry.bulk_histogram import BulkHistogram
from aotllm.serving.telemetry.request_record import FINISHED_REASONS, RequestRecord

_log = logging.getLogger(__name__)

PREFIX = "aotllm:"
ENGINE = "0"
"""`engine` in vLLM is the rank among data-parallel engines of a model, of which there is one"""
LABELS = ("model_name", "engine")
MODEL_VERSION = "1"

# Bounds as in vLLM, whose dashboards and alerts know them; those of inter-token latency have finer ones below its
# smallest, 10 ms, which small models on a CPU undercut.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_TIME_BUCKETS = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
N_BUCKETS = (1, 2, 5, 10, 20)
# vLLM ends them at the context length of its one model; here they are the same for all models.
TOKEN_BUCKETS = (*(m * 10**e for e in range(6) for m in (1, 2, 5)), 10**6)

_COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished requests, those found in the prefix cache included.",
    "prompt_tokens_cached": "Of those, tokens whose keys and values came from the prefix cache.",
    "generation_tokens": "Generated tokens.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Between two outputs of a sequence.", TOKEN_TIME_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Mean time per token of a finished sequence, its first token left out.",
        TOKEN_TIME_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", LATENCY_BUCKETS),
    "request_queue_time_seconds": ("In the queue of the engine.", LATENCY_BUCKETS),
    "request_prefill_time_seconds": ("From the end of the queue to the first token.", LATENCY_BUCKETS),
    "request_decode_time_seconds": ("From the first token to the last one.", LATENCY_BUCKETS),
    "request_inference_time_seconds": ("From the end of the queue to the last token.", LATENCY_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens of a finished request.", TOKEN_BUCKETS),
    "request_generation_tokens": ("Generated tokens of a finished request.", TOKEN_BUCKETS),
    "request_max_num_generation_tokens": ("Tokens of the longest answer of a request.", TOKEN_BUCKETS),
    "request_params_n": ("`n` of a request.", N_BUCKETS),
    "request_params_max_tokens": ("`max_tokens` of requests that give it.", TOKEN_BUCKETS),
}
_TRITON_COUNTERS = {
    "request_success": "Requests that ended well.",
    "count": "Inferences of requests that ended well, one each.",
    "request_duration_us": "Microseconds from arrival to end of such requests.",
    "queue_duration_us": "Of those, in the queue of the engine.",
    "compute_input_duration_us": "Of those, before the queue: chat template and tokens.",
    "compute_infer_duration_us": "Of those, from the end of the queue to the last token.",
    "compute_output_duration_us": "Of those, from the last token to the end.",
}
_TRITON_REASONS = {"overloaded": "REJECTED", "cancelled": "CANCELED", "internal": "BACKEND"}


@dataclass(frozen=True)
class ModelMetrics:
    """The time series of one model, looked up once: finding a series by its labels costs as much as counting."""

    counters: dict[str, Counter]
    histograms: dict[str, BulkHistogram]
    finished: dict[str, Counter]
    """By finished reason"""
    errors: dict[str, Counter]
    """By kind"""
    triton: dict[str, Counter]
    triton_failures: dict[str, Counter]
    """By Triton's reason"""

    def count_tokens(self, tokens: int, intervals: list[float]) -> None:
        """Tokens that were generated, and the seconds between them."""
        self.counters["generation_tokens"].inc(tokens)
        if intervals:
            self.histograms["inter_token_latency_seconds"].observe_many(intervals)

    def saw_first_token(self, seconds: float) -> None:
        """A request has its first token that long after it arrived."""
        self.histograms["time_to_first_token_seconds"].observe(seconds)

    def finish(self, record: RequestRecord) -> None:
        """A request has ended."""
        self.finished[record.finished_reason].inc()
        if record.error_kind is not None:
            known = record.error_kind in self.errors
            self.errors[record.error_kind if known else "internal"].inc()
        if record.result is not None:
            self._observe(record)
        self._count_for_triton(record)

    def _observe(self, record: RequestRecord) -> None:
        result, sampling = record.result, record.request.sampling
        assert result is not None
        self.counters["prompt_tokens"].inc(result.num_prompt_tokens)
        self.counters["prompt_tokens_cached"].inc(result.num_cached_tokens)
        observed = {
            "e2e_request_latency_seconds": record.total_seconds,
            "request_queue_time_seconds": record.queue_seconds,
            "request_prefill_time_seconds": record.prefill_seconds,
            "request_decode_time_seconds": record.decode_seconds,
            "request_inference_time_seconds": record.inference_seconds,
            "request_prompt_tokens": result.num_prompt_tokens,
            "request_generation_tokens": result.num_generated_tokens,
            "request_max_num_generation_tokens": max(len(output.token_ids) for output in result.outputs),
            "request_params_n": sampling.n if sampling is not None else 1,
            "request_params_max_tokens": sampling.max_tokens if sampling is not None else None,
        }
        for name, value in observed.items():
            if value is not None:
                self.histograms[name].observe(value)
        for output in result.outputs:
            if output.seconds_per_token is not None:
                self.histograms["request_time_per_output_token_seconds"].observe(output.seconds_per_token)

    def _count_for_triton(self, record: RequestRecord) -> None:
        if record.result is None or record.finished_reason == "abort":
            kind = record.error_kind or "cancelled"
            self.triton_failures[_TRITON_REASONS.get(kind, "OTHER")].inc()
            return
        self.triton["request_success"].inc()
        self.triton["count"].inc()
        output_seconds = record.end - record.last_token if record.last_token is not None else None
        for name, seconds in {
            "request_duration_us": record.total_seconds,
            "queue_duration_us": record.queue_seconds,
            "compute_input_duration_us": record.prepare_seconds,
            "compute_infer_duration_us": record.inference_seconds,
            "compute_output_duration_us": output_seconds,
        }.items():
            self.triton[name].inc(round(max(0.0, seconds or 0.0) * 1e6))


def shared_folder() -> str | None:
    """Where several front ends keep their counters (prometheus_client's multi-process mode), from the environment
    variable PROMETHEUS_MULTIPROC_DIR. Whoever starts front ends makes an empty folder per server, and sets the variable
    before they start: the library looks at it when it is first imported. None = each process counts for itself."""
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR") or None


class RequestMetrics:
    """Counters and histograms of all models, in a registry of their own; with a `shared_folder` in files there, by
    process, which outlive it."""

    def __init__(self) -> None:
        if shared_folder() is not None and not values.ValueClass._multiprocess:
            _log.warning(
                "PROMETHEUS_MULTIPROC_DIR was set after prometheus_client was imported: what this very process serves "
                "is not counted; set it before the process starts"
            )
        self.registry = CollectorRegistry()
        registry: Any = {"registry": self.registry}
        self._counters = {n: Counter(PREFIX + n, doc, LABELS, **registry) for n, doc in _COUNTERS.items()}
        self._histograms = {
            name: BulkHistogram(PREFIX + name, doc, LABELS, buckets=buckets, **registry)
            for name, (doc, buckets) in _HISTOGRAMS.items()
        }
        self._finished = Counter(
            f"{PREFIX}request_success",
            "Finished requests by reason: stop, length, timeout, abort (cancelled), error.",
            (*LABELS, "finished_reason"),
            **registry,
        )
        self._errors = Counter(
            f"{PREFIX}request_errors", "Requests that were refused or failed, by kind.", (*LABELS, "kind"), **registry
        )
        self._http = Counter(
            f"{PREFIX}http_requests", "HTTP requests by answer.", ("method", "route", "status"), **registry
        )
        triton = ("model", "version")
        self._triton = {
            name: Counter(f"nv_inference_{name}", doc, triton, **registry) for name, doc in _TRITON_COUNTERS.items()
        }
        self._triton_failures = Counter(
            "nv_inference_request_failure",
            "Requests that were refused, cancelled, or failed.",
            (*triton, "reason"),
            **registry,
        )
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """The series of a model, which exist from then on. Call it with names of served models only: there must not
        be as many as clients think of."""
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = self._make(model)
        return known

    def count_http(self, method: str, route: str, status: int) -> None:
        """An HTTP request was answered."""
        self._http.labels(method, route, status).inc()

    def _make(self, model: str) -> ModelMetrics:
        own, triton = (model, ENGINE), (model, MODEL_VERSION)

        def each(counter: Counter, labels: tuple[str, str], values: Iterable[str]) -> dict[str, Counter]:
            return {value: counter.labels(*labels, value) for value in values}

        return ModelMetrics(
            {name: counter.labels(*own) for name, counter in self._counters.items()},
            {name: histogram.labels(*own) for name, histogram in self._histograms.items()},
            each(self._finished, own, FINISHED_REASONS),
            each(self._errors, own, ERROR_KINDS),
            {name: counter.labels(*triton) for name, counter in self._triton.items()},
            each(self._triton_failures, triton, (*_TRITON_REASONS.values(), "OTHER")),
        )
