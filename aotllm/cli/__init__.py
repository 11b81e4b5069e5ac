"""The command line. One file per verb; nothing heavy is imported before a verb runs, and no verb but the one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import aotllm
from aotllm.cli.console import error_line, silence_stdout
from aotllm.errors import AotllmError

if TYPE_CHECKING:
    import typer

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def make_app() -> typer.Typer:
    """The command tree."""
    from typing import Annotated

    import typer

    from aotllm.cli import bench, build, export_triton, inspect, run, serve, tune, verify
    from aotllm.cli.flags import for_typer

    def show_version(asked: bool | None) -> None:
        if asked:
            typer.echo(f"aotllm {aotllm.__version__}")
            raise typer.Exit

    app = typer.Typer(
        name="aotllm",
        help="Compile a language model ahead of time, and run it.",
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def root(version: bool | None = None) -> None:
        pass

    root.__annotations__["version"] = Annotated[
        bool | None, typer.Option("--version", is_eager=True, callback=show_version)
    ]
    app.callback()(root)
    for verb in (
        build.build,
        for_typer(run.run),
        for_typer(serve.serve),
        inspect.inspect,
        verify.verify,
        tune.tune,
        export_triton.export_triton,
    ):
        app.command()(verb)
    app.add_typer(bench.bench_group(), name="bench")
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    A failure is one line on stderr, `error: ...`, and the exit code of its kind: 2 wrong usage, 3 bad checkpoint or
    engine, 4 incompatible machine, 5 overload or time-out, 130 Ctrl-C, else 1. AOTLLM_TRACEBACK=1 shows where it came
    from.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run_quickly(arguments)
        return _run_with_typer(arguments) if code is None else code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        return 1
    except Exception as error:
        if os.environ.get("AOTLLM_TRACEBACK") == "1":
            raise
        return _report(error)


def _run_quickly(arguments: list[str]) -> int | None:
    """Run a verb that need not wait for typer; None where typer has to look at the arguments."""
    verb = _quick_verb(arguments[0]) if arguments else None
    if verb is None:
        return None
    from aotllm.cli.quick_parser import quick_parse

    given = quick_parse(verb, arguments[1:])
    if given is None:
        return None
    result = verb(**given)
    return result if isinstance(result, int) else 0


def _quick_verb(name: str) -> Callable[..., Any] | None:
    if name == "run":
        from aotllm.cli.run import run

        return run
    if name == "serve":
        from aotllm.cli.serve import serve

        return serve
    return None


def _run_with_typer(arguments: list[str]) -> int:
    import typer

    try:
        result = make_app()(arguments or ["--help"], prog_name="aotllm", standalone_mode=False)
        if not arguments:
            return 2
        return result if isinstance(result, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED


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
