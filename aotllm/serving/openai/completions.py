"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from aotllm.request import Request, RequestOutput, SequenceOutput, TokenLogprob, TokenOutput
from aotllm.request_handle import RequestHandle
from aotllm.serving.context import ServingContext
from aotllm.serving.engine import ServingEngine
from aotllm.serving.generation import beam_results, merged, results, submit_all
from aotllm.serving.openai.finish import finish_fields
from aotllm.serving.openai.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs, token_text
from aotllm.serving.openai.protocol import CompletionRequest
from aotllm.serving.openai.sse import TEXT, Chunk, Shortcut, TextEvent, event_stream
from aotllm.serving.openai.usage import usage, usage_of

DEFAULT_MAX_TOKENS = 16  # of the OpenAI API


async def completions(context: ServingContext, body: CompletionRequest, client: HttpRequest) -> Response:
    """Continue one or many prompts, at once or as a stream. Raises AotllmError for what can be refused beforehand."""
    served = context.models.get(body.model)
    engine = served.engine
    call = context.http_call(client)
    call.model = served.name
    body.check_supported()
    sampling = body.sampling(
        engine.default_sampling,
        max_tokens=body.tokens_to_generate(DEFAULT_MAX_TOKENS),
        logprobs=body.logprobs,
        prompt_logprobs=body.num_prompt_logprobs(),
    )
    prompts = body.prompts(context.options.max_prompts)
    form = body.form()
    requests = [
        Request(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            sampling=sampling,
            add_special_tokens=body.add_special_tokens,
            structured_outputs=form,
            adapter=served.adapter,
            **body.request_options(),
        )
        for prompt in prompts
    ]
    answer = _Completion(served.name, engine, body, prompts, sampling.n)
    if (beams := body.beam_search(sampling)) is not None:
        return JSONResponse(answer.whole(await beam_results(engine, requests, beams, client, call)))
    handles = await submit_all(engine, requests, call)
    if body.stream:
        shortcut = Shortcut()
        return event_stream(answer.chunks(handles, shortcut), shortcut)
    return JSONResponse(answer.whole(await results(handles, client)))


class _Completion:
    """The shapes of one answer. Choices are prompt-major: `index = choice + prompt * n`."""

    def __init__(
        self, model: str, engine: ServingEngine, body: CompletionRequest, prompts: Sequence[str | list[int]], n: int
    ) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = engine.tokenizer
        self._body = body
        self._prompts = prompts
        self._n = n

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """A `text_completion` object."""
        if self._body.scores_only:
            results = [_prompt_only(result) for result in results]
        choices = []
        for prompt, result in enumerate(results):
            scored = {}
            if self._body.prompt_logprobs is not None:
                shown = [replace(p, top=p.top[: self._body.prompt_logprobs]) for p in result.prompt_logprobs]
                scored["prompt_logprobs"] = prompt_logprobs(self._tokenizer, shown)
            for output in result.outputs:
                start = self._start(prompt, result.prompt_token_ids, result.prompt_logprobs)
                logprobs = self._logprobs(output.logprobs, len(start.text), start)
                index = prompt * self._n + output.index
                choices.append(self._choice(index, start.text + output.text, output, logprobs, start) | scored)
        return {**self._head, "choices": choices, "usage": usage_of(results)}

    async def chunks(self, handles: Sequence[RequestHandle], shortcut: Shortcut) -> AsyncIterator[Chunk]:
        """`text_completion` objects with text pieces; the last one of a choice has its finish reason."""
        options = self._body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        plain = not (continuous or self._body.return_token_ids)
        prompt_tokens = sum(len(handle.prompt_token_ids) for handle in handles)
        count = 0
        ends: dict[int, int] = {}  # choice -> where its text ends, in characters of its tokens
        text_events: dict[int, TextEvent] = {}

        def only_text(index: int, output: TokenOutput) -> bool:
            """Nothing but the text differs from the event before."""
            return plain and index in text_events and output.finish_reason is None and not output.logprobs

        def through(output: TokenOutput) -> bool:
            index = output.index
            return only_text(index, output) and (not output.text or shortcut(text_events[index](output.text)))

        async with aclosing(merged(handles, through)) as outputs:
            async for prompt, output in outputs:
                index, start = prompt * self._n + output.index, None
                output = _blank(output) if self._body.scores_only else output
                count += len(output.token_ids)
                if index not in ends:
                    start = self._start(prompt, handles[prompt].prompt_token_ids, output.prompt_logprobs)
                    ends[index] = len(start.text)
                    text_events[index] = TextEvent(self._chunk(self._choice(index, TEXT, _NO_OUTPUT, None, None)))
                elif only_text(index, output):
                    if output.text:
                        yield text_events[index](output.text)
                    continue
                text = (start.text if start is not None else "") + output.text
                if not (
                    text
                    or output.logprobs
                    or output.finish_reason
                    or (self._body.return_token_ids and output.token_ids)
                ):
                    continue
                logprobs = self._logprobs(output.logprobs, ends[index], start)
                ends[index] += sum(len(token_text(self._tokenizer, entry.token_id)) for entry in output.logprobs)
                chunk = self._chunk(self._choice(index, text, output, logprobs, start))
                if continuous:
                    chunk["usage"] = usage(prompt_tokens, count)
                yield chunk
        if options is not None and options.include_usage:
            done = [handle.result() for handle in handles]
            done = [_prompt_only(result) for result in done] if self._body.scores_only else done
            yield {**self._head, "choices": [], "usage": usage_of(done)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [choice]}

    def _choice(
        self,
        index: int,
        text: str,
        output: TokenOutput | SequenceOutput,
        logprobs: dict[str, Any] | None,
        start: _Start | None,
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, **finish_fields(output)}
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
            choice["prompt_token_ids"] = list(start.prompt_token_ids) if start is not None else None
        return choice

    def _start(self, prompt: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> _Start:
        given, text = self._prompts[prompt], ""
        if self._body.echo:
            whole = isinstance(given, str) and self._body.truncate_prompt_tokens is None
            text = str(given) if whole else self._tokenizer.decode(token_ids)
        return _Start(token_ids, logprobs, text)

    def _logprobs(
        self, logprobs: Sequence[TokenLogprob], offset: int, start: _Start | None
    ) -> dict[str, list[Any]] | None:
        if self._body.logprobs is None:
            return None
        as_ids = self._body.return_tokens_as_token_ids
        answer = completion_logprobs(self._tokenizer, logprobs, offset, as_ids)
        if start is None or not self._body.echo:
            return answer
        shown = [replace(p, top=p.top[: self._body.logprobs]) for p in start.prompt_logprobs]
        echo = echoed_logprobs(self._tokenizer, start.prompt_token_ids, shown, len(start.text), as_ids)
        return {name: echo[name] + answer[name] for name in answer}


_NO_OUTPUT = TokenOutput("", ())


class _Start(NamedTuple):
    """What comes before the text of a choice."""

    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[TokenLogprob]
    text: str


_Output = TypeVar("_Output", TokenOutput, SequenceOutput)


def _blank(output: _Output) -> _Output:
    """An output without the one token that had to be generated to score the prompt."""
    blank = replace(output, text="", token_ids=(), logprobs=(), stop_reason=None)
    return blank if output.finish_reason is None else replace(blank, finish_reason="length")


def _prompt_only(result: RequestOutput) -> RequestOutput:
    outputs = tuple(_blank(output) for output in result.outputs)
    return replace(result, outputs=outputs, num_generated_tokens=0)
