"""`Statistics`: counts and times of the requests to each model, in the terms of Triton's statistics extension."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aotllm.errors import AotllmError, Cancelled
from aotllm.request import Request, RequestOutput, TokenOutput
from aotllm.request_handle import RequestListener
from aotllm.serving.telemetry.base import Telemetry

if TYPE_CHECKING:
    from aotllm.serving.call import Call

Counts = dict[str, list[int]]
"""Name of a duration -> [count, nanoseconds]"""

STATISTICS_TOPIC = "kserve_statistics"
"""What front ends ask each other for: `Statistics.snapshot`"""

_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_RESPONSE_DURATIONS = ("first_response", "cancel")


class Statistics:
    """Of one front end, by model. Thread-safe.

    A prompt is one inference, and one execution, since each one joins and leaves the batch by itself. `queue` ends
    where the prompt begins to be computed; `compute_infer` is the rest of the engine's time; `compute_input` is all
    before the engine (reading, tokenizing), `compute_output` what building the response takes where it does not stream.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, Counts] = {}
        self._last: dict[str, int] = {}

    def record(self, model: str, durations: Mapping[str, int], last_inference: int | None = None) -> None:
        """Count one of each of `durations` (name -> nanoseconds) for a model.

        Args:
            last_inference: milliseconds since 1970, where a request has ended.
        """
        with self._lock:
            counts = self._counts(model)
            for name, nanoseconds in durations.items():
                counts[name][0] += 1
                counts[name][1] += max(0, nanoseconds)
            if last_inference is not None:
                self._last[model] = max(last_inference, self._last.get(model, 0))

    def snapshot(self) -> dict[str, Any]:
        """All figures, of plain types: to be sent to another process, and to be taken there by `add`."""
        with self._lock:
            return {
                "models": {model: {k: list(v) for k, v in counts.items()} for model, counts in self._models.items()},
                "last_inference": dict(self._last),
            }

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Add the figures of another front end: of `snapshot()` there."""
        with self._lock:
            for model, theirs in snapshot["models"].items():
                counts = self._counts(model)
                for name, (count, nanoseconds) in theirs.items():
                    counts[name][0] += count
                    counts[name][1] += nanoseconds
            for model, last in snapshot["last_inference"].items():
                self._last[model] = max(last, self._last.get(model, 0))

    def of(self, model: str, version: str) -> dict[str, Any]:
        """One `ModelStatistics`, in JSON's terms; zeros for a model that nobody has asked anything."""
        with self._lock:
            counts = {name: {"count": c, "ns": ns} for name, (c, ns) in self._counts(model, keep=False).items()}
            last = self._last.get(model, 0)
        none = {"count": 0, "ns": 0}
        success, first = counts["success"]["count"], counts["first_response"]
        responses = {}
        if first["count"] or counts["cancel"]["count"]:
            responses["0"] = {
                "compute_infer": first,
                "compute_output": none,
                "success": first,
                "fail": none,
                "empty_response": none,
                "cancel": counts["cancel"],
            }
        return {
            "name": model,
            "version": version,
            "last_inference": last,
            "inference_count": success,
            "execution_count": success,
            "inference_stats": {
                **{name: counts[name] for name in _DURATIONS},
                "cache_hit": none,
                "cache_miss": none,
            },
            "response_stats": responses,
            "batch_stats": [],
            "memory_usage": [],
        }

    def _counts(self, model: str, keep: bool = True) -> Counts:
        counts = self._models.get(model)
        if counts is None:
            counts = {name: [0, 0] for name in (*_DURATIONS, *_RESPONSE_DURATIONS)}
            if keep:
                self._models[model] = counts
        return counts


class CountingTelemetry:
    """Passes everything on to another telemetry, and counts."""

    def __init__(self, inner: Telemetry, statistics: Statistics) -> None:
        self._inner = inner
        self._statistics = statistics

    def begin(self, call: Call, request: Request) -> RequestListener:
        """See `Telemetry.begin`."""
        return _CountingListener(self._inner.begin(call, request), self._statistics, call)

    def close(self) -> None:
        """See `Telemetry.close`. The inner one is not ours to close."""


class _CountingListener:
    def __init__(
        self, inner: RequestListener, statistics: Statistics, call: Call, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._statistics = statistics
        self._call = call
        self._clock = clock
        self._answered = False

    def on_output(self, output: TokenOutput) -> None:
        self._inner.on_output(output)
        if not self._answered:
            self._answered = True
            self._statistics.record(self._call.model, {"first_response": self._elapsed()})

    def on_end(self, result: RequestOutput | None, error: AotllmError | None) -> None:
        self._inner.on_end(result, error)
        self._statistics.record(self._call.model, self._durations(result, error), int(time.time() * 1000))

    def _durations(self, result: RequestOutput | None, error: AotllmError | None) -> dict[str, int]:
        total = self._elapsed()
        cancelled = result is not None and result.outputs[0].finish_reason == "cancelled"
        if cancelled or isinstance(error, Cancelled):
            return {"fail": total, "cancel": total}
        if result is None:
            return {"fail": total}
        engine = round(result.timings.total_seconds * 1e9)
        queue = round((result.timings.queue_seconds or 0.0) * 1e9)
        return {"success": total, "queue": queue, "compute_input": total - engine, "compute_infer": engine - queue}

    def _elapsed(self) -> int:
        return round((self._clock() - self._call.arrival) * 1e9)
