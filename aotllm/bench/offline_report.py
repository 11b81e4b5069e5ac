"""Results of an engine in this process for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from aotllm.bench.offline_point import OfflinePoint, remarks
from aotllm.bench.report import print_point, print_sweep
from aotllm.bench.spread import Spread


def print_throughput(points: Sequence[OfflinePoint], console: Console) -> None:
    """All figures of each point's typical run, and one row per point with the spread of its runs."""
    for point in points:
        print_point(point.typical, console)
    if len(points) > 1:
        print_sweep([point.typical for point in points], console)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("load")
    for heading in ("runs", "requests/s", "output tok/s", "total tok/s"):
        table.add_column(heading, justify="right")
    for point in points:
        requests = point.spread(lambda run: run.measures.request_throughput)
        total = point.spread(lambda run: run.measures.total_throughput)
        cells = (requests.text(2), point.output_throughput.text(), total.text())
        table.add_row(point.typical.load, str(len(point.runs)), *cells)
    console.print(table)
    _print_remarks(points, console)


def print_latency(points: Sequence[OfflinePoint], console: Console) -> None:
    """One row per point."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    headings = ("batch", "depth", "prefill tok/s", "decode tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "batch ms")
    for heading in headings:
        table.add_column(heading, justify="right")
    for point in points:
        latencies = point.typical.measures.latencies
        cells = [
            str(point.batch_size),
            str(point.depth),
            _rate(point.prefill_throughput),
            _rate(point.decode_throughput),
        ]
        for name in ("ttft", "tpot"):
            cells += [f"{latencies[name].median * 1000:.1f}", f"{latencies[name].p99 * 1000:.1f}"]
        table.add_row(*cells, point.latency.text(0, 1000))
    context, first = points[0].context, points[0].typical
    lengths = first.run.records[0]
    console.print(
        f"\n{first.context.model} at {first.context.url} ({context.target}), prompts of "
        f"{lengths.wanted_input - points[0].depth} tokens, answers of {lengths.wanted_output}; "
        f"{len(points[0].runs)} runs: median (min–max)",
        markup=False,
        highlight=False,
    )
    console.print(table)
    console.print("latencies in milliseconds, of the median run", highlight=False)
    for point in points:
        failed = point.typical.measures.failed
        if failed:
            message = next(r.error.message for r in point.typical.run.records if r.error is not None)
            console.print(f"batch {point.batch_size}: {failed} failed, such as: {message[:300]}", markup=False)
    _print_remarks(points, console)


def _rate(spread: Spread | None) -> str:
    return "-" if spread is None else spread.text()


def _print_remarks(points: Sequence[OfflinePoint], console: Console) -> None:
    for line in remarks(points):
        console.print(line, markup=False, highlight=False)
