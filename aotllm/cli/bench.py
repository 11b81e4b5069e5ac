"""`aotllm bench`: load and speed. `serve` drives a server over the network; the other verbs run an engine here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aotllm.bench.options import LoadOptions, ReportOptions, TargetOptions, WorkloadOptions
from aotllm.cli import EXIT_INTERRUPTED
from aotllm.cli.bench_offline import latency, throughput
from aotllm.cli.bench_result import Progress, check_outputs, options_of, write_json
from aotllm.cli.console import note
from aotllm.cli.flags import schema_flags, with_flags
from aotllm.errors import AotllmError, InvalidRequest

if TYPE_CHECKING:
    from aotllm.bench.result import BenchPoint

_OPTIONS: tuple[type, ...] = (TargetOptions, WorkloadOptions, LoadOptions, ReportOptions)


def bench_group() -> typer.Typer:
    """The verbs under `aotllm bench`."""
    group = typer.Typer(help="Measure load and speed.", rich_markup_mode=None, no_args_is_help=True)
    group.callback()(_group)
    group.command()(serve)
    group.command()(throughput)
    group.command()(latency)
    return group


def _group() -> None:
    pass


@with_flags([flag for options in _OPTIONS for flag in schema_flags(options)])
def serve(
    more_goodput: Annotated[
        list[str] | None,
        typer.Argument(hidden=True, metavar="NAME:MS", help="The objectives of --goodput after its first one."),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE|-",
            help="Write the result as JSON, an object or for a sweep a list of them; - = stdout. Its keys are those of "
            "`vllm bench serve`.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Put load on a server and measure throughput and latencies.

    Any OpenAI endpoint will do, and KServe's (Triton's) over HTTP and gRPC. Ctrl-C ends a run and prints what was
    measured so far.
    """
    if more_goodput and not options["goodput"]:
        raise InvalidRequest(f"unexpected argument {more_goodput[0]!r}; the server is named by --url", "goodput")
    options["goodput"] = [*(options["goodput"] or ()), *(more_goodput or ())]
    report = options_of(ReportOptions, options)
    check_outputs(json, report.plot)
    points, interrupted = _measure(
        options_of(TargetOptions, options),
        options_of(WorkloadOptions, options),
        options_of(LoadOptions, options),
        report,
        quiet=json == "-",
    )
    if json is not None and points:
        write_json(points, json)
    if report.plot is not None and points:
        from aotllm.bench.plot import write_plot

        write_plot(points, Path(report.plot))
        note(f"{report.plot}: the throughput-latency curve")
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(point.measures.completed for point in points):
        raise AotllmError("no request has succeeded")


def _measure(
    target: TargetOptions, workload: WorkloadOptions, load: LoadOptions, report: ReportOptions, *, quiet: bool
) -> tuple[list[BenchPoint], bool]:
    """The points, and whether Ctrl-C has ended them. The tables go to stderr where stdout is for JSON."""
    from rich.console import Console

    from aotllm.bench.event_loop import run_on_fast_loop
    from aotllm.bench.report import print_point, print_sweep

    try:
        from aotllm.bench.session import BenchSession
    except ImportError as error:
        raise AotllmError(f"bench serve needs {error.name}: pip install 'aotllm[bench]'") from None

    console = Console(stderr=quiet, width=None if sys.stdout.isatty() else 160)
    progress = Progress()

    def show(point: BenchPoint) -> None:
        progress.clear()
        print_point(point, console)

    session = BenchSession(target, workload, load, report, tell=note, on_end=progress, on_point=show)
    points = run_on_fast_loop(session.run())
    if len(points) > 1:
        print_sweep(points, console)
    return points, session.interrupted
