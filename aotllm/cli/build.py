"""`aotllm build`: compile a checkpoint to an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aotllm.builder.options import BuildOptions
from aotllm.cli.console import note, print_json, size
from aotllm.cli.flags import dataclass_flags, with_flags
from aotllm.errors import InvalidRequest

if TYPE_CHECKING:
    from aotllm.builder.build import BuildProgress

_STAGES = {
    "read": "Reading checkpoint",
    "compile": "Compiling graph",
    "pack": "Packing weights",
    "write": "Writing engine",
}


@with_flags(dataclass_flags(BuildOptions))
def build(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a GGUF file, or hf:org/name.", metavar="MODEL")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The engine folder to make.", metavar="ENGINE_DIR")],
    fp8: Annotated[bool, typer.Option("--fp8", help="Short for --quantize fp8.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    **options: Any,
) -> None:
    """Compile a checkpoint to an engine."""
    if fp8:
        if options["quantize"] not in (None, "fp8"):
            raise InvalidRequest(f"--fp8 contradicts --quantize {options['quantize']}; give one of them", "quantize")
        options["quantize"] = "fp8"
    from aotllm.builder.build import build as build_engine

    with _Progress(shown=not json) as progress:
        report = build_engine(model, output, BuildOptions(**options), progress.show)
    if json:
        print_json(
            {
                "engine": str(report.path),
                "seconds": report.seconds,
                "stage_seconds": report.stage_seconds,
                "bytes": report.bytes,
                "manifest": report.manifest.model_dump(mode="json"),
            }
        )
    else:
        print(f"{report.path}: {size(report.bytes)} in {report.seconds:.1f} s")


class _Progress:
    """A bar per stage on a terminal, a line per stage elsewhere, nothing where it is not `shown`; all on stderr."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Progress:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description:<20}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, progress: BuildProgress) -> None:
        """Take news of the build."""
        title = _STAGES.get(progress.stage, progress.stage)
        if self._bars is not None:
            if progress.stage not in self._tasks:
                self._tasks[progress.stage] = self._bars.add_task(title, total=progress.total)
            self._bars.update(self._tasks[progress.stage], completed=progress.done, total=progress.total)
        elif self._shown and progress.done == progress.total:
            note(f"{title}: done")
