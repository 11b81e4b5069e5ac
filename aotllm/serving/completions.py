"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from aotllm.executor import Executor
from aotllm.request import Request, RequestOutput, SequenceOutput, TokenLogprob, TokenOutput
from aotllm.request_handle import RequestHandle
from aotllm.serving.finish import finish_fields
from aotllm.serving.generation import beam_results, merged, results, submit_all
from aotllm.serving.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs, token_text
from aotllm.serving.models import ServedModels
from aotllm.serving.protocol import CompletionRequest
from aotllm.serving.sse import event_stream
from aotllm.serving.usage import usage, usage_of

DEFAULT_MAX_TOKENS = 16  # of the OpenAI API


async def completions(models: ServedModels, body: CompletionRequest, client: HttpRequest) -> Response:
    """Continue one or many prompts, at once or as a stream. Raises AotllmError for what can be refused beforehand."""
    name, executor, adapter, _ = models.get(body.model)
    body.check_supported()
    sampling = body.sampling(
        executor.default_sampling,
        max_tokens=body.tokens_to_generate(DEFAULT_MAX_TOKENS),
        logprobs=body.logprobs,
        prompt_logprobs=body.num_prompt_logprobs(),
    )
    prompts = body.prompts()
    form = body.form()
    requests = [
        Request(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            sampling=sampling,
            add_special_tokens=body.add_special_tokens,
            structured_outputs=form,
            adapter=adapter,
            **body.request_options(),
        )
        for prompt in prompts
    ]
    answer = _Completion(name, executor, body, prompts, sampling.n)
    if (beams := body.beam_search(sampling)) is not None:
        return JSONResponse(answer.whole(await beam_results(executor, requests, beams, client)))
    handles = await submit_all(executor, requests)
    if body.stream:
        return event_stream(answer.chunks(handles))
    return JSONResponse(answer.whole(await results(handles, client)))


class _Completion:
    """The shapes of one answer. Choices are prompt-major: `index = choice + prompt * n`."""

    def __init__(
        self, model: str, executor: Executor, body: CompletionRequest, prompts: Sequence[str | list[int]], n: int
    ) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = executor.tokenizer
        self._body = body
        self._echoes = [self._echo(prompt) for prompt in prompts]
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
                start = _Start(result.prompt_token_ids, result.prompt_logprobs, self._echoes[prompt])
                logprobs = self._logprobs(output.logprobs, len(start.text), start)
                index = prompt * self._n + output.index
                choices.append(self._choice(index, start.text + output.text, output, logprobs) | scored)
        return {**self._head, "choices": choices, "usage": usage_of(results)}

    async def chunks(self, handles: Sequence[RequestHandle]) -> AsyncIterator[dict[str, Any]]:
        """`text_completion` objects with text pieces; the last one of a choice has its finish reason."""
        options = self._body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        prompt_tokens = sum(len(handle.prompt_token_ids) for handle in handles)
        count = 0
        ends: dict[int, int] = {}  # choice -> where its text ends, in characters of its tokens
        async for prompt, output in merged(handles):
            index, start = prompt * self._n + output.index, None
            output = _blank(output) if self._body.scores_only else output
            if index not in ends:
                start = _Start(handles[prompt].prompt_token_ids, output.prompt_logprobs, self._echoes[prompt])
                ends[index] = len(start.text)
            text = (start.text if start is not None else "") + output.text
            count += len(output.token_ids)
            if not (text or output.logprobs or output.finish_reason):
                continue
            logprobs = self._logprobs(output.logprobs, ends[index], start)
            ends[index] += sum(len(token_text(self._tokenizer, entry.token_id)) for entry in output.logprobs)
            chunk = {**self._head, "choices": [self._choice(index, text, output, logprobs)]}
            if continuous:
                chunk["usage"] = usage(prompt_tokens, count)
            yield chunk
        if options is not None and options.include_usage:
            done = [handle.result() for handle in handles]
            done = [_prompt_only(result) for result in done] if self._body.scores_only else done
            yield {**self._head, "choices": [], "usage": usage_of(done)}

    def _choice(
        self, index: int, text: str, output: TokenOutput | SequenceOutput, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, **finish_fields(output)}

    def _echo(self, prompt: str | list[int]) -> str:
        if not self._body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _logprobs(
        self, logprobs: Sequence[TokenLogprob], offset: int, start: _Start | None
    ) -> dict[str, list[Any]] | None:
        if self._body.logprobs is None:
            return None
        answer = completion_logprobs(self._tokenizer, logprobs, offset)
        if start is None or not self._body.echo:
            return answer
        shown = [replace(p, top=p.top[: self._body.logprobs]) for p in start.prompt_logprobs]
        echo = echoed_logprobs(self._tokenizer, start.prompt_token_ids, shown, len(start.text))
        return {name: echo[name] + answer[name] for name in answer}


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
