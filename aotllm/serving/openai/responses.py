"""`POST /v1/responses`: OpenAI's newer endpoint, for text."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from aotllm.errors import AotllmError, Internal, Overloaded
from aotllm.request import Request, RequestOutput, TokenLogprob
from aotllm.request_handle import RequestHandle
from aotllm.sampling_params import SamplingParams
from aotllm.serving.context import ServingContext
from aotllm.serving.generation import merged, results, submit_all
from aotllm.serving.openai.logprobs import chat_logprobs
from aotllm.serving.openai.response_store import ResponseStore, Stored
from aotllm.serving.openai.responses_protocol import Messages, ResponsesRequest, own_names
from aotllm.serving.openai.sse import EventStreamResponse, event
from aotllm.tokenization import Tokenizer


async def responses(
    context: ServingContext, store: ResponseStore, body: ResponsesRequest, client: HttpRequest
) -> Response:
    """Answer a conversation, at once or as typed events. Raises AotllmError for what can be refused beforehand."""
    served = context.models.get(body.model)
    engine = served.engine
    call = context.http_call(client)
    call.model = served.name
    body.check_supported()
    sampling = body.sampling(engine.default_sampling)
    conversation = body.messages()
    if body.previous_response_id is not None:
        conversation = [*store.get(body.previous_response_id, "previous_response_id").messages, *conversation]
    system = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
    request = Request(
        messages=[*system, *conversation],
        sampling=sampling,
        structured_outputs=body.form(),
        adapter=served.adapter,
        **body.request_options(),
    )
    with own_names():
        (handle,) = await submit_all(engine, [request], call)
    answer = _Answer(served.name, engine.tokenizer, body, sampling, conversation, store)
    if body.stream:
        return EventStreamResponse(answer.events(handle), answer.failure)
    (result,) = await results([handle], client)
    return JSONResponse(await answer.whole(result))


class _Answer:
    """The shapes of one answer: one message of one text part."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        body: ResponsesRequest,
        sampling: SamplingParams,
        conversation: Messages,
        store: ResponseStore,
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._conversation = conversation
        self._store = store
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._sent = 0
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **_echoed(body, sampling),
        }

    async def whole(self, result: RequestOutput) -> dict[str, Any]:
        """A finished `response` object, which is kept if the client wants that."""
        answer = result.outputs[0]
        cut = answer.finish_reason != "stop"
        item = self._item(answer.text, answer.logprobs, "incomplete" if cut else "completed")
        response = self._response("incomplete" if cut else "completed", [item], _usage(result))
        if cut:
            # Of OpenAI's reasons this is the one that means "cut"; a time limit is told apart by `stop_reason`.
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if answer.stop_reason is not None or answer.finish_reason == "timeout":
            response["stop_reason"] = answer.stop_reason if answer.finish_reason != "timeout" else "timeout"
        if self._body.store:
            said = {"role": "assistant", "content": answer.text}
            await self._store.put(Stored(response, [*self._conversation, said]))
        return response

    async def events(self, handle: RequestHandle) -> AsyncIterator[bytes]:
        """The typed events of a stream."""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        yield self._event("response.output_item.added", output_index=0, item=self._item(None, (), "in_progress"))
        yield self._event("response.content_part.added", **place, part=self._part("", ()))
        async with aclosing(merged([handle])) as outputs:
            async for _, output in outputs:
                if output.text or (output.logprobs and self._body.wants_logprobs):
                    logprobs = self._logprobs(output.logprobs)
                    yield self._event("response.output_text.delta", **place, delta=output.text, logprobs=logprobs)
        response = await self.whole(handle.result())
        (item,) = response["output"]
        (part,) = item["content"]
        yield self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: AotllmError) -> bytes:
        """The last event of a stream that failed."""
        response = self._response("failed")
        code = "server_error" if isinstance(error, (Internal, Overloaded)) else "invalid_prompt"
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)

    def _response(
        self, status: str, output: Sequence[dict[str, Any]] = (), usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "output": list(output),
            "usage": usage,
            "error": None,
            "incomplete_details": None,
        }

    def _item(self, text: str | None, logprobs: Sequence[TokenLogprob], status: str) -> dict[str, Any]:
        content = [] if text is None else [self._part(text, logprobs)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(logprobs)}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        if not self._body.wants_logprobs:
            return []
        content: list[dict[str, Any]] = chat_logprobs(self._tokenizer, logprobs)["content"]
        return content


def _echoed(body: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    """What the client asked for, which comes back in each `response` object."""
    extra = body.model_extra or {}
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": extra.get("parallel_tool_calls") is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **body.text},
        "tool_choice": extra.get("tool_choice", "auto"),
        "tools": [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _usage(result: RequestOutput) -> dict[str, Any]:
    return {
        "input_tokens": result.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": result.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": result.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": result.num_prompt_tokens + result.num_generated_tokens,
    }
