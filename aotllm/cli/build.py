"""`aotllm build`: compile a checkpoint to an engine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aotllm.builder.options import BuildOptions
from aotllm.cli.console import note, print_json, size
from aotllm.cli.flags import dataclass_flags, with_flags
from aotllm.errors import InvalidRequest

if TYPE_CHECKING:
    from aotllm.builder.build import BuildProgress, BuildReport
    from aotllm.perplexity import Perplexity, QuantizationCost

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
    report_perplexity: Annotated[
        Path | None,
        typer.Option(
            "--report-perplexity",
            help="Measure the engine's perplexity on this text, and with --quantize what it was without (target cpu).",
            metavar="TEXT_FILE",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    **options: Any,
) -> None:
    """Compile a checkpoint to an engine."""
    if fp8:
        if options["quantize"] not in (None, "fp8"):
            raise InvalidRequest(f"--fp8 contradicts --quantize {options['quantize']}; give one of them", "quantize")
        options["quantize"] = "fp8"
    from aotllm.builder.build import build as build_engine

    chosen = BuildOptions(**options)
    text = None if report_perplexity is None else _text(report_perplexity, chosen)
    with _Progress(shown=not json) as progress:
        report = build_engine(model, output, chosen, progress.show)
    figures = None if text is None else _perplexity(model, report, chosen, text)
    if json:
        print_json(
            {
                "engine": str(report.path),
                "seconds": report.seconds,
                "stage_seconds": report.stage_seconds,
                "bytes": report.bytes,
                "manifest": report.manifest.model_dump(mode="json"),
                **({} if figures is None else {"perplexity": _record(figures)}),
            }
        )
    else:
        print(f"{report.path}: {size(report.bytes)} in {report.seconds:.1f} s")
        if figures is not None:
            print(_sentence(figures))


def _text(file: Path, options: BuildOptions) -> str:
    """What the perplexity is of; asked for before the build, so that nothing is built in vain."""
    if options.target != "cpu":
        raise InvalidRequest(
            f"report_perplexity: got {file} with target {options.target}; only engines of target cpu are measured",
            "report_perplexity",
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidRequest(f"report_perplexity: {file} cannot be read: {reason}", "report_perplexity") from None


def _perplexity(model: str, report: BuildReport, options: BuildOptions, text: str) -> Perplexity | QuantizationCost:
    from aotllm.engines import open_engine
    from aotllm.perplexity import measure_perplexity, quantization_cost

    if options.quantize is not None:
        return quantization_cost(model, report.path, options, text)
    return measure_perplexity(open_engine(report.path, verify=False), text)


def _record(figures: Perplexity | QuantizationCost) -> dict[str, Any]:
    from aotllm.perplexity import QuantizationCost

    if isinstance(figures, QuantizationCost):
        return {
            **asdict(figures.quantized),
            "unquantized": figures.unquantized.perplexity,
            "change": figures.change,
        }
    return asdict(figures)


def _sentence(figures: Perplexity | QuantizationCost) -> str:
    from aotllm.perplexity import QuantizationCost

    of = figures.quantized if isinstance(figures, QuantizationCost) else figures
    sentence = f"perplexity {of.perplexity:.3f} over {of.scored_tokens} tokens in chunks of {of.chunk_tokens}"
    if isinstance(figures, QuantizationCost):
        sentence += f"; {figures.unquantized.perplexity:.3f} without quantization ({figures.change:+.2%})"
    return sentence


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
