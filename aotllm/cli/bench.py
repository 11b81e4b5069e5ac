"""`aotllm bench`: load and speed. `serve` drives a server over the network."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from aotllm.bench.options import LoadOptions, ReportOptions, TargetOptions, WorkloadOptions
from aotllm.cli.console import note, print_json
from aotllm.cli.flags import schema_flags, with_flags
from aotllm.errors import AotllmError, InvalidRequest
from aotllm.parameters import parameters

if TYPE_CHECKING:
    from aotllm.bench.result import BenchPoint

EXIT_INTERRUPTED = 130  # 128 + SIGINT

T = TypeVar("T")

_OPTIONS: tuple[type, ...] = (TargetOptions, WorkloadOptions, LoadOptions, ReportOptions)


def bench_group() -> typer.Typer:
    """The verbs under `aotllm bench`."""
    group = typer.Typer(help="Measure load and speed.", rich_markup_mode=None, no_args_is_help=True)
    group.callback()(_group)
    group.command()(serve)
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
    report = _of(ReportOptions, options)
    _check_outputs(json, report.plot)
    points, interrupted = _measure(
        _of(TargetOptions, options), _of(WorkloadOptions, options), _of(LoadOptions, options), report, quiet=json == "-"
    )
    if json is not None and points:
        _write_json(points, json)
    if report.plot is not None and points:
        from aotllm.bench.plot import write_plot

        write_plot(points, Path(report.plot))
        note(f"{report.plot}: the throughput-latency curve")
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(point.measures.completed for point in points):
        raise AotllmError("no request has succeeded")


def _check_outputs(json: str | None, plot: str | None) -> None:
    """Before an hour of measuring: can its result be written?"""
    for name, file in (("--json", json), ("--plot", plot)):
        if file not in (None, "-") and not Path(str(file)).absolute().parent.is_dir():
            raise InvalidRequest(f"{name} {file}: there is no such folder", name.strip("-"))
    if plot is not None:
        from aotllm.bench.plot import check_plot

        check_plot(Path(plot))


def _of(cls: type[T], options: dict[str, Any]) -> T:
    """The options of one class; those that were not given keep their defaults."""
    return cls(**{name: options[name] for name, _, _ in parameters(cls) if options[name] is not None})


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
    progress = _Progress()

    def show(point: BenchPoint) -> None:
        progress.clear()
        print_point(point, console)

    session = BenchSession(target, workload, load, report, tell=note, on_end=progress, on_point=show)
    points = run_on_fast_loop(session.run())
    if len(points) > 1:
        print_sweep(points, console)
    return points, session.interrupted


class _Progress:
    """A line on a terminal, rewritten once a second at most: the client shares its core with nobody for nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next = clock, 0.0
        self._shown = sys.stderr.isatty()

    def __call__(self, ended: int, of: int | None) -> None:
        if self._shown and (now := self._clock()) >= self._next:
            self._next = now + 1.0
            print(f"\r{ended}{f' of {of}' if of else ''} requests", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _write_json(points: list[BenchPoint], where: str) -> None:
    value = points[0].json() if len(points) == 1 else [point.json() for point in points]
    if where == "-":
        print_json(value)
        return
    with open(where, "w", encoding="utf-8") as file:
        json_module.dump(value, file, ensure_ascii=False)
        file.write("\n")
