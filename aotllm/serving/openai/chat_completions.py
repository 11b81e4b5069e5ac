"""`POST /v1/chat/completions`."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from aotllm.serving.context import ServingContext
from aotllm.serving.generation import beam_results, results, submit_all
from aotllm.serving.openai.chat_answer import ChatAnswer
from aotllm.serving.openai.chat_request import ChatRequest
from aotllm.serving.openai.protocol import ChatCompletionRequest
from aotllm.serving.openai.sse import Shortcut, event_stream


async def chat_completions(context: ServingContext, body: ChatCompletionRequest, client: HttpRequest) -> Response:
    """Answer a conversation, at once or as a stream. Raises AotllmError for what can be refused beforehand."""
    served = context.models.get(body.model)
    engine = served.engine
    call = context.http_call(client)
    call.model = served.name
    chat = ChatRequest(body, served, context.options)
    answer = ChatAnswer(served.name, engine, body, chat.message_form)
    if (beams := body.beam_search(chat.sampling)) is not None:
        return JSONResponse(answer.whole(*await beam_results(engine, [chat.request], beams, client, call)))
    (handle,) = await submit_all(engine, [chat.request], call)
    if body.stream:
        shortcut = Shortcut()
        return event_stream(answer.chunks(handle, shortcut), shortcut)
    return JSONResponse(answer.whole(*await results([handle], client)))
