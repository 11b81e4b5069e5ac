"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from aotllm.executor import Executor
from aotllm.request import Request, RequestOutput, TokenLogprob
from aotllm.request_handle import RequestHandle
from aotllm.serving.generation import merged, results, submit_all
from aotllm.serving.logprobs import chat_logprobs
from aotllm.serving.models import ServedModels
from aotllm.serving.protocol import ChatCompletionRequest
from aotllm.serving.sse import event_stream
from aotllm.serving.usage import usage, usage_of


async def chat_completions(models: ServedModels, body: ChatCompletionRequest, client: HttpRequest) -> Response:
    """Answer a conversation, at once or as a stream. Raises AotllmError for what can be refused beforehand."""
    name, executor = models.get(body.model)
    body.check_supported()
    sampling = body.sampling(
        executor.default_sampling,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=body.num_top_logprobs(),
    )
    request = Request(
        messages=body.plain_messages(),
        sampling=sampling,
        chat_template_kwargs=body.chat_template_kwargs,
        priority=body.priority,
    )
    handles = await submit_all(executor, [request], body.n)
    answer = _ChatAnswer(name, executor, body)
    if body.stream:
        return event_stream(answer.chunks(handles))
    return JSONResponse(answer.whole(await results(handles, client)))


class _ChatAnswer:
    """The shapes of one answer."""

    def __init__(self, model: str, executor: Executor, body: ChatCompletionRequest) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer = executor.tokenizer
        self._body = body

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """A `chat.completion` object."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": output.text},
                    "logprobs": self._logprobs(output.logprobs),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                }
                for index, output in enumerate(outputs)
            ],
            "usage": usage_of(outputs, len(outputs)),
        }

    async def chunks(self, handles: Sequence[RequestHandle]) -> AsyncIterator[dict[str, Any]]:
        """`chat.completion.chunk` objects: role with the first token, text, finish reason; usage where asked for."""
        options = self._body.stream_options
        counts = [0] * len(handles)
        continuous = options is not None and options.continuous_usage_stats

        def chunk(index: int, delta: dict[str, str], **fields: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
            usages = {"usage": usage(len(handles[0].prompt_token_ids), sum(counts))} if continuous else {}
            return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usages}

        started: set[int] = set()
        async for index, output in merged(handles):
            counts[index] += len(output.token_ids)
            if index not in started:
                started.add(index)
                yield chunk(index, {"role": "assistant", "content": ""})
            if output.text or output.logprobs:
                yield chunk(index, {"content": output.text}, logprobs=self._logprobs(output.logprobs))
            if output.finish_reason is not None:
                end = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
                yield chunk(index, {"content": ""}, **end)
        if options is not None and options.include_usage:
            done = [handle.result() for handle in handles]
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(done, len(done))}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, logprobs) if self._body.logprobs else None
