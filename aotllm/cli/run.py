"""`aotllm run`: answer one prompt, or chat."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aotllm.cli.console import note, print_json
from aotllm.cli.flags import schema_flags, with_flags
from aotllm.errors import InvalidRequest
from aotllm.manager import ExecutorConfig
from aotllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aotllm.executor import Executor
    from aotllm.request import Request, RequestOutput

_SIZES = ("num_threads", "num_kv_blocks")


@with_flags([*schema_flags(SamplingParams, unset=True), *schema_flags(ExecutorConfig, only=_SIZES)])
def run(
    engine: Annotated[Path, typer.Argument(help="Folder of the engine.", metavar="ENGINE_DIR")],
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p", "--prompt", help="Answer this and end; - reads it from stdin. Without: chat.", metavar="TEXT"
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", help="System message.", metavar="TEXT"),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check the engine's digests first.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming; needs -p.")] = False,
    **options: Any,
) -> None:
    """Answer a prompt, or chat."""
    if json and prompt is None:
        raise InvalidRequest("--json needs a prompt; give one with -p", "prompt")
    if raw and system is not None:
        raise InvalidRequest("--system needs the chat template; leave out --raw", "system")
    sizes = {name: options.pop(name) for name in _SIZES}
    with _load(engine, verify=verify, **sizes) as (executor, load_seconds):
        params = _sampling(executor.default_sampling, options)
        if prompt is None:
            from aotllm.cli.chat import Chat

            Chat(executor, params, system, raw).loop()
            return
        request = _request(sys.stdin.read() if prompt == "-" else prompt, system, raw, params)
        result = executor.submit(request).result() if json else _stream(executor, request)
    figures = _figures(result, load_seconds)
    if json:
        print_json(
            {
                "text": result.text,
                "token_ids": result.token_ids,
                "finish_reason": result.finish_reason,
                "stop_reason": result.stop_reason,
                "num_prompt_tokens": result.num_prompt_tokens,
                "num_cached_tokens": result.num_cached_tokens,
                "logprobs": [{"token_id": p.token_id, "logprob": p.logprob, "top": p.top} for p in result.logprobs],
                "timings": figures,
            }
        )
    else:
        note(" · ".join(_figure_texts(figures, len(result.token_ids))))


@contextmanager
def _load(engine: Path, **options: Any) -> Iterator[tuple[Executor, float]]:
    start = time.monotonic()
    from aotllm.executor import Executor

    with Executor(engine, **options) as executor:
        yield executor, time.monotonic() - start


def _sampling(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    return defaults.replace(**{name: value for name, value in given.items() if value is not None})


def _request(prompt: str, system: str | None, raw: bool, sampling: SamplingParams) -> Request:
    from aotllm.request import Request

    if raw:
        return Request(prompt=prompt, sampling=sampling)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return Request(messages=[*messages, {"role": "user", "content": prompt}], sampling=sampling)


def _stream(executor: Executor, request: Request) -> RequestOutput:
    handle = executor.submit(request)
    for output in handle:
        print(output.text, end="", flush=True)
    print(flush=True)
    return handle.result()


def _figures(result: RequestOutput, load_seconds: float) -> dict[str, float | None]:
    return {
        "load_seconds": load_seconds,
        "first_token_seconds": result.timings.first_token_seconds,
        "total_seconds": result.timings.total_seconds,
        "tokens_per_second": result.tokens_per_second,
    }


def _figure_texts(figures: dict[str, float | None], num_tokens: int) -> Iterator[str]:
    yield f"load {figures['load_seconds']:.2f} s"
    if figures["first_token_seconds"] is not None:
        yield f"first token {figures['first_token_seconds']:.3f} s"
    yield f"{num_tokens} tokens"
    if figures["tokens_per_second"] is not None:
        yield f"{figures['tokens_per_second']:.1f} tokens/s"
