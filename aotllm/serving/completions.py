"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from aotllm.errors import InvalidRequest
from aotllm.executor import Executor
from aotllm.request import Request, RequestOutput, TokenLogprob
from aotllm.request_handle import RequestHandle
from aotllm.serving.generation import merged, results, submit_all
from aotllm.serving.logprobs import completion_logprobs, token_text
from aotllm.serving.models import ServedModels
from aotllm.serving.protocol import CompletionRequest
from aotllm.serving.sse import event_stream
from aotllm.serving.usage import usage, usage_of

DEFAULT_MAX_TOKENS = 16  # of the OpenAI API


async def completions(models: ServedModels, body: CompletionRequest, client: HttpRequest) -> Response:
    """Continue one or many prompts, at once or as a stream. Raises AotllmError for what can be refused beforehand."""
    name, executor = models.get(body.model)
    body.check_supported()
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported: prompts are not scored; leave one out", "echo")
    sampling = body.sampling(
        executor.default_sampling,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
    )
    prompts = body.prompts()
    requests = [
        Request(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            sampling=sampling,
            add_special_tokens=body.add_special_tokens,
            priority=body.priority,
        )
        for prompt in prompts
    ]
    handles = await submit_all(executor, requests, body.n)
    answer = _Completion(name, executor, body, prompts)
    if body.stream:
        return event_stream(answer.chunks(handles))
    return JSONResponse(answer.whole(await results(handles, client)))


class _Completion:
    """The shapes of one answer. Choices are prompt-major: `index = choice + prompt * n`."""

    def __init__(
        self, model: str, executor: Executor, body: CompletionRequest, prompts: Sequence[str | list[int]]
    ) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = executor.tokenizer
        self._body = body
        self._prompts = prompts

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """A `text_completion` object."""
        return {
            **self._head,
            "choices": [
                self._choice(index, self._echo(index) + output.text, output, self._logprobs(output.logprobs, 0))
                for index, output in enumerate(outputs)
            ],
            "usage": usage_of(outputs, self._body.n),
        }

    async def chunks(self, handles: Sequence[RequestHandle]) -> AsyncIterator[dict[str, Any]]:
        """`text_completion` objects with text pieces; the last one of a choice has its finish reason."""
        options = self._body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        prompt_tokens = sum(len(handle.prompt_token_ids) for handle in handles[:: self._body.n])
        counts, offsets = [0] * len(handles), [0] * len(handles)
        async for index, output in merged(handles):
            text = output.text if counts[index] else self._echo(index) + output.text
            counts[index] += len(output.token_ids)
            if not (text or output.logprobs or output.finish_reason):
                continue
            logprobs = self._logprobs(output.logprobs, offsets[index])
            offsets[index] += sum(len(token_text(self._tokenizer, entry.token_id)) for entry in output.logprobs)
            chunk = {**self._head, "choices": [self._choice(index, text, output, logprobs)]}
            if continuous:
                chunk["usage"] = usage(prompt_tokens, sum(counts))
            yield chunk
        if options is not None and options.include_usage:
            done = [handle.result() for handle in handles]
            yield {**self._head, "choices": [], "usage": usage_of(done, self._body.n)}

    def _choice(self, index: int, text: str, output: Any, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // self._body.n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _logprobs(self, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        return completion_logprobs(self._tokenizer, logprobs, offset) if self._body.logprobs is not None else None
