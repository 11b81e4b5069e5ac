"""The command line. One file per verb; nothing heavy is imported before a verb runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import aotllm
from aotllm.cli import bench, build, export_triton, inspect, run, serve, tune, verify
from aotllm.cli.console import error_line, silence_stdout
from aotllm.errors import AotllmError

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def make_app() -> typer.Typer:
    """The command tree."""
    app = typer.Typer(
        name="aotllm",
        help="Compile a language model ahead of time, and run it.",
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for verb in (
        build.build,
        run.run,
        serve.serve,
        inspect.inspect,
        verify.verify,
        tune.tune,
        export_triton.export_triton,
    ):
        app.command()(verb)
    app.add_typer(bench.bench_group(), name="bench")
    return app


def _root(
    version: Annotated[
        bool | None,
        typer.Option("--version", is_eager=True, callback=lambda value: _show_version() if value else None),
    ] = None,
) -> None:
    pass


def _show_version() -> None:
    typer.echo(f"aotllm {aotllm.__version__}")
    raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    A failure is one line on stderr, `error: ...`, and the exit code of its kind: 2 wrong usage, 3 bad checkpoint or
    engine, 4 incompatible machine, 5 overload or time-out, 130 Ctrl-C, else 1. AOTLLM_TRACEBACK=1 shows where it came
    from.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = make_app()(arguments or ["--help"], prog_name="aotllm", standalone_mode=False)
        if not arguments:
            return 2
        return result if isinstance(result, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        return 1
    except Exception as error:
        if os.environ.get("AOTLLM_TRACEBACK") == "1":
            raise
        return _report(error)


def _report(error: Exception) -> int:
    if isinstance(error, AotllmError):
        error_line(error.message)
        return error.exit_code
    # A usage error of click, which newer versions of typer carry inside: there is no one class to name.
    if hasattr(error, "format_message"):
        message = error.format_message()
        if message:
            error_line(f"{message.rstrip('.')}; see aotllm --help")
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        error_line(f"{error.filename}: {error.strerror}")
        return 1
    error_line(f"{type(error).__name__}: {error} (a fault of aotllm; AOTLLM_TRACEBACK=1 shows where)")
    return 1
