"""`aotllm export-triton`: write a model repository for NVIDIA's Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aotllm.cli.console import print_json
from aotllm.cli.flags import schema_flags, with_flags
from aotllm.executor_config import ExecutorConfig
from aotllm.export_triton.model_settings import ModelSettings
from aotllm.parameters import parameters
from aotllm.triton_tensors.models import CLASSIC_MODELS

_SETTINGS = ("verify", "exclude_input_in_output", "cancellation_check_period_ms")


# The batch size of the executor has a flag of its own name; here that name says how many prompts a request may have.
@with_flags(
    [
        *schema_flags(ModelSettings, unset=True, only=_SETTINGS),
        *schema_flags(
            ExecutorConfig, unset=True, only=[n for n, _, _ in parameters(ExecutorConfig) if n != "max_batch_size"]
        ),
    ]
)
def export_triton(
    engine: Annotated[Path, typer.Argument(help="Folder of the engine.", metavar="ENGINE_DIR")],
    output: Annotated[Path, typer.Argument(help="The model repository; others' models may be in it.", metavar="DIR")],
    name: Annotated[
        str | None, typer.Option("--name", help="Model that holds the engine; default: the engine folder's name.")
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias", help=f"Model that forwards to it; may be repeated; default: {', '.join(CLASSIC_MODELS)}."
        ),
    ] = None,
    no_alias: Annotated[bool, typer.Option("--no-alias", help="No models that forward.")] = False,
    max_batch_size: Annotated[
        int | None,
        typer.Option("--max-batch-size", help="Most prompts of one request; default: the engine's.", min=1),
    ] = None,
    decoupled: Annotated[
        bool, typer.Option("--decoupled/--no-decoupled", help="Streaming calls, or plain ones with one response.")
    ] = True,
    engine_files: Annotated[
        str, typer.Option("--engine-files", help="copy or symlink the engine into DIR, or refer to it by its path.")
    ] = "copy",
    execution_env: Annotated[
        str | None,
        typer.Option("--execution-env", help="Python environment with aotllm, for Triton's EXECUTION_ENV_PATH."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace models that aotllm exported.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    **options: Any,
) -> None:
    """Write a model repository for Triton's Python backend."""
    from aotllm.export_triton.repository_writer import ExportOptions, export_repository

    given = {key: value for key, value in options.items() if value is not None}
    ExecutorConfig(**{key: value for key, value in given.items() if key not in _SETTINGS})
    ModelSettings(**{key: value for key, value in given.items() if key in _SETTINGS})
    report = export_repository(
        engine,
        output,
        ExportOptions(
            name=name,
            aliases=() if no_alias else tuple(alias or CLASSIC_MODELS),
            max_batch_size=max_batch_size,
            decoupled=decoupled,
            engine_files=engine_files,  # type: ignore[arg-type]  # checked there
            execution_env=execution_env,
            parameters={key: _text(value) for key, value in given.items()},
            force=force,
        ),
    )
    if json:
        print_json(
            {
                "repository": str(report.path),
                "models": list(report.models),
                "max_batch_size": report.max_batch_size,
                "decoupled": report.decoupled,
            }
        )
    else:
        print(f"{report.path}: {', '.join(report.models)}; start with tritonserver --model-repository={report.path}")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
