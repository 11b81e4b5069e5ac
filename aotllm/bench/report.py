"""Results for people: a table per point, and one over a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from aotllm.bench.latencies import LATENCY_NAMES
from aotllm.bench.result import BenchPoint
from aotllm.bench.soak import drift_lines
from aotllm.bench.statistics import percent_name

_LAG = 0.010
"""Seconds late at the 99th percentile from which the client is said to be too slow"""


def print_point(point: BenchPoint, console: Console) -> None:
    """All figures of one run."""
    context = point.context
    console.print(
        f"\n{context.model} at {context.url} ({context.backend}), {context.workload}, {point.load}", markup=False
    )
    console.print(_totals(point))
    console.print(_latencies(point))
    for line in remarks(point):
        console.print(line, markup=False, highlight=False)


def _totals(point: BenchPoint) -> Table:
    measures, run = point.measures, point.run
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    requests = f"{measures.completed} completed, {measures.failed} failed"
    if run.cancelled:
        requests += f", {run.cancelled} cut off"
    table.add_row("requests", requests)
    table.add_row("duration", f"{measures.duration:.2f} s")
    table.add_row("request throughput", f"{measures.request_throughput:.2f} requests/s")
    if measures.goodput is not None:
        table.add_row("request goodput", f"{measures.goodput:.2f} requests/s")
    table.add_row(
        "input tokens", f"{measures.input_tokens} ({_per_request(measures.input_tokens, measures.completed)})"
    )
    table.add_row(
        "output tokens", f"{measures.output_tokens} ({_per_request(measures.output_tokens, measures.completed)})"
    )
    table.add_row("output throughput", f"{measures.output_throughput:.1f} tokens/s")
    table.add_row("total throughput", f"{measures.total_throughput:.1f} tokens/s")
    table.add_row("peak output in a second", f"{measures.max_output_tokens_per_s:.0f} tokens")
    table.add_row("peak concurrent requests", str(measures.max_concurrent_requests))
    if measures.prefix_hit_rate is not None:
        table.add_row("prefix hit rate", f"{measures.prefix_hit_rate:.1%}")
    return table


def _latencies(point: BenchPoint) -> Table:
    names = [name for name in point.context.metrics if point.measures.latencies[name].count]
    percents = [percent for percent, _ in point.measures.client_lag.percentiles]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("milliseconds")
    for heading in ("mean", "median", "std", *map(percent_name, percents)):
        table.add_column(heading, justify="right")
    for name in names:
        distribution = point.measures.latencies[name]
        values = [distribution.mean, distribution.median, distribution.std, *(v for _, v in distribution.percentiles)]
        table.add_row(f"{name.upper()} ({LATENCY_NAMES[name]})", *(f"{value * 1000:.2f}" for value in values))
    return table


def remarks(point: BenchPoint) -> list[str]:
    """Sentences on what a reader of the figures must know."""
    measures, run = point.measures, point.run
    lines = []
    for kind, count in measures.error_counts.items():
        example = next(r.error.message for r in run.records if r.error is not None and r.error.error_kind == kind)
        lines.append(f"failed, {kind}: {count}, such as: {example[:300]}")
    if run.skipped:
        lines.append(f"{run.skipped} turns were not asked, since the one before them had failed")
    done = [record for record in run.records if record.ok]
    if done:
        lines.append(
            f"lengths per request, wanted and measured: input {_mean([r.wanted_input for r in done]):.1f} and "
            f"{measures.input_tokens / len(done):.1f}, output {_mean([r.wanted_output for r in done]):.1f} and "
            f"{measures.output_tokens / len(done):.1f} (prompts {point.context.lengths_by})"
        )
    if done and not measures.outputs_measured:
        lines.append("the server does not say how many tokens answers have: each chunk was counted as one")
    if done and not measures.prompts_measured:
        lines.append("the server does not say how many tokens prompts have: input tokens are those wanted")
    lag = measures.client_lag.p99
    if lag > _LAG:
        lines.append(
            f"the client or its machine is too slow for this load: one request in a hundred was sent more than "
            f"{lag * 1000:.0f} ms late"
        )
    if run.interrupted:
        lines.append("interrupted: these are the requests that had ended")
    if point.soak is not None:
        lines += ["drift over the run:", *(f"  {line}" for line in drift_lines(point.soak.windows))]
    return lines


def print_sweep(points: Sequence[BenchPoint], console: Console) -> None:
    """One row per point."""
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("load")
    headings = (
        "failed",
        "requests/s",
        "goodput",
        "output tok/s",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "E2EL p50",
        "p99",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for point in points:
        measures = point.measures
        cells = [str(measures.failed), f"{measures.request_throughput:.2f}"]
        cells.append("-" if measures.goodput is None else f"{measures.goodput:.2f}")
        cells.append(f"{measures.output_throughput:.1f}")
        for name in ("ttft", "tpot", "e2el"):
            distribution = measures.latencies[name]
            cells += [f"{distribution.median * 1000:.1f}", f"{distribution.p99 * 1000:.1f}"]
        table.add_row(point.load, *cells)
    console.print(table)
    console.print("latencies in milliseconds", highlight=False)


def _per_request(total: int, count: int) -> str:
    return f"{total / count:.1f} per request" if count else "none"


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
