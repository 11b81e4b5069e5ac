"""`aotllm serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from aotllm.cli.console import note, print_json
from aotllm.cli.flags import schema_flags, with_flags
from aotllm.cli.lora_flag import LORA_OPTION, parse_loras
from aotllm.cli.memory_table import memory_table
from aotllm.errors import InvalidRequest
from aotllm.executor_config import ExecutorConfig


@with_flags(schema_flags(ExecutorConfig))
def serve(
    engines: Annotated[list[Path], typer.Argument(help="Folders of the engines.", metavar="ENGINE_DIR...")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--http-port", help="Port; 0 = any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", help="Key that requests under /v1 must bring; may be repeated.", envvar="AOTLLM_API_KEY"
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="Name in the API, one per engine; default: the folder's name."),
    ] = None,
    lora: Annotated[list[str] | None, LORA_OPTION] = None,
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", help="Seconds that SIGTERM leaves to requests in flight.", min=0)
    ] = 30.0,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check the engines' digests first.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when ready.")] = False,
    **options: Any,
) -> None:
    """Serve engines over HTTP, with OpenAI's API."""
    names = _model_names(engines, served_model_name or [])
    loras = parse_loras(lora or [], taken=names)
    if loras and len(names) > 1:
        raise InvalidRequest(f"--lora needs to know its model: serve one engine, got {len(names)}", "lora")
    config = ExecutorConfig(**options)

    from aotllm.executor import Executor
    from aotllm.serving import create_app, run_server

    with ExitStack() as stack:
        executors = {
            name: stack.enter_context(Executor(engine, config, verify=verify))
            for name, engine in zip(names, engines, strict=True)
        }
        for name, folder in loras.items():
            executors[names[0]].load_lora(name, folder)

        def ready(url: str) -> None:
            memory = {name: executor.memory() for name, executor in executors.items()}
            served = [*names, *loras]
            if json:
                print_json({"url": url, "models": served, "kv_memory": {n: asdict(m) for n, m in memory.items()}})
                return
            for name, bought in memory.items():
                note(f"{name}: {memory_table(bought)}")
            note(f"serving {', '.join(served)} on {url}")

        app = create_app(executors, api_keys=api_key or [])
        run_server(app, host, http_port, drain_timeout, ready)


def _model_names(engines: list[Path], given: list[str]) -> list[str]:
    if given and len(given) != len(engines):
        raise InvalidRequest(
            f"--served-model-name was given {len(given)} times for {len(engines)} engines; give one per engine",
            "served_model_name",
        )
    names = given or [engine.resolve().name for engine in engines]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidRequest(
            f"several engines are named {twice.pop()!r}; tell them apart with --served-model-name", "served_model_name"
        )
    return names
