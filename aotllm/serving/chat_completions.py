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
from aotllm.serving.finish import finish_fields
from aotllm.serving.generation import beam_results, merged, results, submit_all
from aotllm.serving.logprobs import chat_logprobs, prompt_logprobs
from aotllm.serving.models import ServedModels
from aotllm.serving.protocol import ChatCompletionRequest
from aotllm.serving.sse import event_stream
from aotllm.serving.usage import usage, usage_of


async def chat_completions(models: ServedModels, body: ChatCompletionRequest, client: HttpRequest) -> Response:
    """Answer a conversation, at once or as a stream. Raises AotllmError for what can be refused beforehand."""
    name, executor, adapter, _ = models.get(body.model)
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
        structured_outputs=body.form(),
        adapter=adapter,
        **body.request_options(),
    )
    answer = _ChatAnswer(name, executor, body)
    if (beams := body.beam_search(sampling)) is not None:
        return JSONResponse(answer.whole(*await beam_results(executor, [request], beams, client)))
    (handle,) = await submit_all(executor, [request])
    if body.stream:
        return event_stream(answer.chunks(handle))
    return JSONResponse(answer.whole(*await results([handle], client)))


class _ChatAnswer:
    """The shapes of one answer."""

    def __init__(self, model: str, executor: Executor, body: ChatCompletionRequest) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer = executor.tokenizer
        self._body = body

    def whole(self, result: RequestOutput) -> dict[str, Any]:
        """A `chat.completion` object."""
        scored = {}
        if self._body.prompt_logprobs is not None:
            scored["prompt_logprobs"] = prompt_logprobs(self._tokenizer, result.prompt_logprobs)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": output.index,
                    "message": {"role": "assistant", "content": output.text},
                    "logprobs": self._logprobs(output.logprobs),
                    **finish_fields(output),
                }
                for output in result.outputs
            ],
            "usage": usage_of([result]),
            **scored,
        }

    async def chunks(self, handle: RequestHandle) -> AsyncIterator[dict[str, Any]]:
        """`chat.completion.chunk` objects: role with the first token, text, finish reason; usage where asked for."""
        options = self._body.stream_options
        count = 0
        continuous = options is not None and options.continuous_usage_stats

        def chunk(index: int, delta: dict[str, str], **fields: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
            usages = {"usage": usage(len(handle.prompt_token_ids), count)} if continuous else {}
            return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usages}

        started: set[int] = set()
        async for _, output in merged([handle]):
            index = output.index
            count += len(output.token_ids)
            if index not in started:
                started.add(index)
                yield chunk(index, {"role": "assistant", "content": ""})
            if output.text or output.logprobs:
                yield chunk(index, {"content": output.text}, logprobs=self._logprobs(output.logprobs))
            if output.finish_reason is not None:
                yield chunk(index, {"content": ""}, **finish_fields(output))
        if options is not None and options.include_usage:
            total = usage_of([handle.result()])
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": total}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, logprobs) if self._body.logprobs else None
