"""`OfflinePoint`: the repeats of one load on an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aotllm.bench.phases import Phases
from aotllm.bench.result import BenchPoint
from aotllm.bench.spread import Spread


@dataclass(frozen=True)
class OfflineContext:
    """What all points of a sweep have in common, beside their `BenchContext`."""

    target: str
    num_threads: int
    """Of target cpu; 0 = as many as the process may use"""
    load_seconds: float
    """Of the engine, digests included where they were checked"""
    kv_cache_tokens: int

    def json(self) -> dict[str, Any]:
        """With the keys of the result."""
        return vars(self).copy()


@dataclass
class OfflinePoint:
    """One load, and its runs in the order in which they were made."""

    context: OfflineContext
    batch_size: int | None = None
    """Requests that begin together; None where others follow them"""
    depth: int = 0
    """Tokens before each prompt that were in the KV cache already"""
    runs: list[BenchPoint] = field(default_factory=list)
    preemptions: int = 0
    """Of all runs"""

    @property
    def typical(self) -> BenchPoint:
        """The run of median output throughput; of two in the middle, the slower one."""
        ordered = sorted(self.runs, key=lambda run: run.measures.output_throughput)
        return ordered[(len(ordered) - 1) // 2]

    def spread(self, value: Callable[[BenchPoint], float]) -> Spread:
        """Of a figure over the runs."""
        return Spread(tuple(map(value, self.runs)))

    @property
    def output_throughput(self) -> Spread:
        """Generated tokens per second."""
        return self.spread(lambda run: run.measures.output_throughput)

    @property
    def latency(self) -> Spread:
        """Seconds from the first submission to the last end."""
        return self.spread(lambda run: run.measures.duration)

    @property
    def prefill_throughput(self) -> Spread | None:
        """See `Phases`."""
        return Spread.of(Phases.of(run.run).prefill_throughput for run in self.runs)

    @property
    def decode_throughput(self) -> Spread | None:
        """See `Phases`."""
        return Spread.of(Phases.of(run.run).decode_throughput for run in self.runs)

    def json(self) -> dict[str, Any]:
        """The typical run with the keys of `vllm bench serve`, and the spread of the runs."""
        value = self.typical.json() | self.context.json()
        value["preemptions"] = self.preemptions
        value["repeats"] = {
            "output_throughput": self.output_throughput.json(),
            "total_token_throughput": self.spread(lambda run: run.measures.total_throughput).json(),
            "request_throughput": self.spread(lambda run: run.measures.request_throughput).json(),
            "latency": self.latency.json(),
        }
        if self.batch_size is not None:
            prefill, decode = self.prefill_throughput, self.decode_throughput
            value |= {
                "batch_size": self.batch_size,
                "depth": self.depth,
                "prefill_throughput": prefill and prefill.json(),
                "decode_throughput": decode and decode.json(),
            }
        return value


def remarks(points: Sequence[OfflinePoint]) -> list[str]:
    """Sentences on what a reader of the figures must know."""
    lines = []
    for point in points:
        name = f"batch {point.batch_size}, depth {point.depth}" if point.batch_size is not None else point.typical.load
        if point.preemptions:
            lines.append(
                f"{name}: {point.preemptions} preemptions: the KV cache holds {point.context.kv_cache_tokens} tokens; "
                "see --kv-cache-memory"
            )
        records = [record for run in point.runs for record in run.run.records if record.ok]
        cached = min((record.cached_tokens or 0 for record in records), default=0)
        if point.depth and cached < point.depth:
            lines.append(
                f"{name}: only {cached} of {point.depth} tokens were found in the KV cache; the rest was computed "
                "within the measurement"
            )
        if point.batch_size is not None and point.decode_throughput is None and records:
            lines.append(f"{name}: no time at which all requests decode; a longer --output-len makes one")
    return lines
