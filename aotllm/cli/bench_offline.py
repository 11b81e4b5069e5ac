"""`aotllm bench throughput` and `aotllm bench latency`: an engine in this process, without a server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aotllm.bench.offline_options import LatencyOptions, PromptOptions, ThroughputOptions
from aotllm.bench.options import ReportOptions
from aotllm.cli import EXIT_INTERRUPTED
from aotllm.cli.bench_result import Progress, check_outputs, options_of, write_json
from aotllm.cli.console import note
from aotllm.cli.flags import schema_flags, with_flags
from aotllm.errors import AotllmError, InvalidRequest
from aotllm.executor_config import ExecutorConfig

if TYPE_CHECKING:
    from rich.console import Console

    from aotllm.bench.offline_bench import OfflineBench
    from aotllm.bench.offline_point import OfflinePoint

_REPORT = schema_flags(ReportOptions, unset=True, only=("percentile_metrics", "metric_percentiles", "detailed", "plot"))

Engine = Annotated[Path, typer.Argument(help="Folder of the engine.", metavar="ENGINE_DIR")]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write the result as JSON, an object or for a sweep a list of them; - = stdout. Keys as of `bench serve`, "
        "and the spread of the runs.",
    ),
]
Threads = Annotated[int | None, typer.Option("-t", "--threads", help="Short for --num-threads.", min=0)]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Check the engine's digests first.")]


@with_flags([*schema_flags(PromptOptions), *schema_flags(ThroughputOptions), *schema_flags(ExecutorConfig), *_REPORT])
def throughput(
    engine: Engine,
    batch_sizes: Annotated[
        str | None, typer.Option("--batch-sizes", help="Another name of --concurrency.", hidden=True)
    ] = None,
    threads: Threads = None,
    verify: Verify = True,
    json: Json = None,
    **options: Any,
) -> None:
    """Run many requests through an engine and measure throughput and latencies.

    All requests are there at the start; --concurrency limits how many run at a time. No server, and no text: prompts
    are token ids, and answers stay such.
    """
    _rename(options, "concurrency", batch_sizes)
    wanted = options_of(ThroughputOptions, options)

    def measure(bench: OfflineBench) -> list[OfflinePoint]:
        return bench.throughput(wanted)

    def show(points: list[OfflinePoint], console: Console) -> None:
        from aotllm.bench.offline_report import print_throughput

        print_throughput(points, console)

    ignore_eos = wanted.dataset is None
    _bench(engine, options, threads, verify, json, ignore_eos=ignore_eos, measure=measure, show=show)


@with_flags([*schema_flags(PromptOptions), *schema_flags(LatencyOptions), *schema_flags(ExecutorConfig), *_REPORT])
def latency(
    engine: Engine,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", help="Another name of --batch-sizes.", hidden=True)
    ] = None,
    threads: Threads = None,
    verify: Verify = True,
    json: Json = None,
    **options: Any,
) -> None:
    """Run batches that begin together and measure prefill, decode and latencies apart.

    Prefill counts from the start to the last request's first token, decode while all requests of the batch decode;
    with --depth the tokens before each prompt are in the KV cache before the clock runs.
    """
    if concurrency is not None:
        options["batch_sizes"] = concurrency
    wanted = options_of(LatencyOptions, options)

    def measure(bench: OfflineBench) -> list[OfflinePoint]:
        return bench.latency(wanted)

    def show(points: list[OfflinePoint], console: Console) -> None:
        from aotllm.bench.offline_report import print_latency

        print_latency(points, console)

    _bench(engine, options, threads, verify, json, ignore_eos=True, measure=measure, show=show)


def _rename(options: dict[str, Any], name: str, value: Any) -> None:
    """The value of another spelling of an option."""
    if value is None:
        return
    if options[name] is not None:
        raise InvalidRequest(f"--{name} was given twice, once by its other name", name)
    options[name] = value


def _bench(
    engine: Path,
    options: dict[str, Any],
    threads: int | None,
    verify: bool,
    json: str | None,
    *,
    ignore_eos: bool,
    measure: Callable[[OfflineBench], list[OfflinePoint]],
    show: Callable[[list[OfflinePoint], Console], None],
) -> None:
    """Load, measure, print and write."""
    options["detailed"] = bool(options["detailed"])  # thousands of numbers, only where asked for
    report, prompt = options_of(ReportOptions, options), options_of(PromptOptions, options)
    if threads is not None:
        options["num_threads"] = threads
    config = options_of(ExecutorConfig, options)
    check_outputs(json, report.plot)

    from rich.console import Console

    from aotllm.bench.offline_bench import OfflineBench
    from aotllm.bench.offline_engine import OfflineEngine

    progress = Progress()
    wanted_eos = ignore_eos if prompt.ignore_eos is None else prompt.ignore_eos
    with OfflineEngine(
        engine, config, verify=verify, temperature=prompt.temperature, ignore_eos=wanted_eos, seed=prompt.seed
    ) as loaded:
        points = measure(OfflineBench(loaded, engine, config, prompt, report, tell=note, on_end=progress))
        progress.clear()
    if points:
        show(points, Console(stderr=json == "-", width=None if sys.stdout.isatty() else 160))
        _write(points, json, report.plot)
    if loaded.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(point.typical.measures.completed for point in points):
        raise AotllmError("no request has succeeded")


def _write(points: list[OfflinePoint], json: str | None, plot: str | None) -> None:
    if json is not None:
        write_json(points, json)
    if plot is not None:
        from aotllm.bench.plot import write_plot

        write_plot([point.typical for point in points], Path(plot))
        note(f"{plot}: the throughput-latency curve")
