"""`aotllm run`: answer one prompt, or chat."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from aotllm.beam_search import BeamSearchParams
from aotllm.cli.console import note, print_json
from aotllm.cli.flags import schema_flags, with_options
from aotllm.cli.lora_flag import LORA_OPTION, parse_loras
from aotllm.cli.memory_table import memory_table
from aotllm.cli.options import Argument, Option
from aotllm.errors import InvalidRequest, TimedOut
from aotllm.executor_config import ExecutorConfig
from aotllm.parameters import parameters
from aotllm.sampling_params import SamplingParams
from aotllm.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from aotllm.executor import Executor
    from aotllm.request import Request, RequestOutput, SequenceOutput, TokenLogprob

_FLAGS = {"json": "--json-schema", "regex": "--regex", "choice": "--choice", "grammar": "--grammar"}


@with_options(
    [
        *schema_flags(SamplingParams, unset=True),
        *schema_flags(BeamSearchParams, unset=True),
        *schema_flags(ExecutorConfig),
    ]
)
def run(
    engine: Annotated[Path, Argument(help="Folder of the engine.", metavar="ENGINE_DIR")],
    prompt: Annotated[
        str | None,
        Option(("-p", "--prompt"), help="Answer this and end; - reads it from stdin. Without: chat.", metavar="TEXT"),
    ] = None,
    system: Annotated[
        str | None,
        Option(("--system",), help="System message.", metavar="TEXT"),
    ] = None,
    raw: Annotated[bool, Option(("--raw",), help="Continue the text as it is, without the chat template.")] = False,
    json_schema: Annotated[
        str | None,
        Option(("--json-schema",), help="Answer with JSON that fits this schema.", metavar="FILE|TEXT"),
    ] = None,
    regex: Annotated[str | None, Option(("--regex",), help="Answer with a match of this.", metavar="REGEX")] = None,
    choice: Annotated[
        list[str] | None, Option(("--choice",), help="Answer with one of these; repeat it.", metavar="TEXT")
    ] = None,
    grammar: Annotated[
        str | None,
        Option(("--grammar",), help="Answer with what this Lark or GBNF grammar allows.", metavar="FILE|TEXT"),
    ] = None,
    lora: Annotated[list[str] | None, LORA_OPTION] = None,
    verify: Annotated[
        bool,
        Option(("--verify/--no-verify",), help="Check the engine's digests where its files are new or have changed."),
    ] = True,
    verbose: Annotated[bool, Option(("-v", "--verbose"), help="Tell what the KV memory buys.")] = False,
    json: Annotated[bool, Option(("--json",), help="Print one JSON object instead of streaming; needs -p.")] = False,
    **options: Any,
) -> None:
    """Answer a prompt, or chat."""
    if json and prompt is None:
        raise InvalidRequest("--json needs a prompt; give one with -p", "prompt")
    if raw and system is not None:
        raise InvalidRequest("--system needs the chat template; leave out --raw", "system")
    form = _form(json=json_schema, regex=regex, choice=choice, grammar=grammar)
    if form is not None and prompt is None:
        raise InvalidRequest("an answer of a given form needs a prompt; give one with -p", "prompt")
    loras = parse_loras(lora or [])
    if len(loras) > 1:
        raise InvalidRequest(f"an answer has one adapter at most, got {len(loras)}: {', '.join(loras)}", "lora")
    config = ExecutorConfig(**{name: options.pop(name) for name, _, _ in parameters(ExecutorConfig)})
    beams = _beam_search({name: options.pop(name) for name, _, _ in parameters(BeamSearchParams)})
    with _load(engine, config, verify=verify) as (executor, load_seconds):
        if verbose:
            note(memory_table(executor.memory()))
        for name, folder in loras.items():
            executor.load_lora(name, folder)
        params = _sampling(executor.default_sampling, options)
        adapter = next(iter(loras), None)
        if prompt is None:
            _refuse_for_chat(params, beams)
            from aotllm.cli.chat import Chat

            Chat(executor, params, system, raw, adapter).loop()
            return
        request = _request(sys.stdin.read() if prompt == "-" else prompt, system, raw, params, adapter)
        request = dataclasses.replace(request, structured_outputs=form)
        result = _answer(executor, request, beams, stream=not json)
    figures = _figures(result, load_seconds)
    if json:
        print_json(_record(result, figures))
    else:
        note(" · ".join(_figure_texts(figures, result.num_generated_tokens)))
    if any(output.finish_reason == "timeout" for output in result.outputs):
        raise TimedOut("the time was over before the answer was; --timeout sets it")


@contextmanager
def _load(engine: Path, config: ExecutorConfig, verify: bool) -> Iterator[tuple[Executor, float]]:
    start = time.monotonic()
    from aotllm.executor import Executor

    with Executor(engine, config, verify=verify) as executor:
        yield executor, time.monotonic() - start


def _sampling(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    return defaults.replace(**{name: value for name, value in given.items() if value is not None})


def _form(**given: Any) -> StructuredOutputs | None:
    form = {name: value for name, value in given.items() if value}
    for name in ("json", "grammar"):
        if name in form:
            form[name] = _file_or_text(form[name])
    return StructuredOutputs(**form, param=" and ".join(_FLAGS[name] for name in form)) if form else None


def _file_or_text(value: str) -> str:
    try:
        return Path(value).read_text(encoding="utf-8") if Path(value).is_file() else value
    except UnicodeDecodeError:
        raise InvalidRequest(f"{value} is not UTF-8 text") from None
    except (OSError, ValueError):  # too long for a path, say
        return value


def _beam_search(given: dict[str, Any]) -> BeamSearchParams | None:
    given = {name: value for name, value in given.items() if value is not None}
    if given and "beam_width" not in given:
        name = next(iter(given))
        raise InvalidRequest(f"--{name.replace('_', '-')} is for beam search; give --beam-width, too", name)
    return BeamSearchParams(**given) if given else None


def _refuse_for_chat(sampling: SamplingParams, beams: BeamSearchParams | None) -> None:
    if beams is not None or sampling.num_sequences > 1:
        raise InvalidRequest("a chat goes on with one answer that streams; give the prompt with -p", "prompt")


def _request(prompt: str, system: str | None, raw: bool, sampling: SamplingParams, adapter: str | None) -> Request:
    from aotllm.request import Request

    if raw:
        return Request(prompt=prompt, sampling=sampling, adapter=adapter)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return Request(messages=[*messages, {"role": "user", "content": prompt}], sampling=sampling, adapter=adapter)


def _answer(executor: Executor, request: Request, beams: BeamSearchParams | None, stream: bool) -> RequestOutput:
    """The finished answers; printed unless `stream` is off. A single one is printed as it comes."""
    if beams is None and stream and request.sampling is not None and request.sampling.n == 1:
        return _stream(executor, request)
    result = executor.submit(request).result() if beams is None else executor.beam_search(request, beams)
    if stream:
        for output in result.outputs:
            if len(result.outputs) > 1:
                score = "" if output.score is None else f" · score {output.score:.4f}"
                print(f"--- {output.index + 1} of {len(result.outputs)}{score}")
            print(output.text, flush=True)
    return result


def _stream(executor: Executor, request: Request) -> RequestOutput:
    handle = executor.submit(request)
    for output in handle:
        print(output.text, end="", flush=True)
    print(flush=True)
    return handle.result()


def _record(result: RequestOutput, figures: dict[str, float | None]) -> dict[str, Any]:
    record = {
        **_answer_record(result.outputs[0]),
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_cached_tokens": result.num_cached_tokens,
        "timings": figures,
    }
    if result.prompt_logprobs:
        record["prompt_logprobs"] = _logprob_records(result.prompt_logprobs)
    if len(result.outputs) > 1:
        record["answers"] = [_answer_record(output) for output in result.outputs]
    return record


def _answer_record(output: SequenceOutput) -> dict[str, Any]:
    scores = {} if output.score is None else {"score": output.score}
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "logprobs": _logprob_records(output.logprobs),
        **scores,
    }


def _logprob_records(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [{"token_id": p.token_id, "logprob": p.logprob, "top": p.top} for p in logprobs]


def _figures(result: RequestOutput, load_seconds: float) -> dict[str, float | None]:
    return {
        "load_seconds": load_seconds,
        "queue_seconds": result.timings.queue_seconds,
        "first_token_seconds": result.timings.first_token_seconds,
        "total_seconds": result.timings.total_seconds,
        "tokens_per_second": result.tokens_per_second,
        "draft_acceptance": result.draft_acceptance,
    }


def _figure_texts(figures: dict[str, float | None], num_tokens: int) -> Iterator[str]:
    yield f"load {figures['load_seconds']:.2f} s"
    if figures["first_token_seconds"] is not None:
        yield f"first token {figures['first_token_seconds']:.3f} s"
    yield f"{num_tokens} tokens"
    if figures["tokens_per_second"] is not None:
        yield f"{figures['tokens_per_second']:.1f} tokens/s"
    if figures["draft_acceptance"] is not None:
        yield f"{figures['draft_acceptance']:.0%} of the guesses right"
