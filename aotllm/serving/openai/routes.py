"""The routes under /v1. What answers a request is imported by the first one that asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from aotllm.serving.context import ServingContext
from aotllm.serving.openai.response_store import ResponseStore
from aotllm.serving.router import Router

if TYPE_CHECKING:
    from aotllm.serving.openai.embeddings import EmbeddingRequest
    from aotllm.serving.openai.protocol import ChatCompletionRequest, CompletionRequest
    from aotllm.serving.openai.responses_protocol import ResponsesRequest

_HERE = __name__.rpartition(".")[0]


def openai_routes(context: ServingContext) -> Router:
    """Everything of OpenAI's API that is served."""
    router = Router()
    models = context.models
    store = ResponseStore(context.responses, context.options.max_stored_responses)

    @router.post("/v1/chat/completions", body=f"{_HERE}.protocol:ChatCompletionRequest")
    async def post_chat_completions(body: ChatCompletionRequest, client: Request) -> Response:
        from aotllm.serving.openai.chat_completions import chat_completions

        return await chat_completions(context, body, client)

    @router.post("/v1/completions", body=f"{_HERE}.protocol:CompletionRequest")
    async def post_completions(body: CompletionRequest, client: Request) -> Response:
        from aotllm.serving.openai.completions import completions

        return await completions(context, body, client)

    @router.post("/v1/responses", body=f"{_HERE}.responses_protocol:ResponsesRequest")
    async def post_responses(body: ResponsesRequest, client: Request) -> Response:
        from aotllm.serving.openai.responses import responses

        return await responses(context, store, body, client)

    @router.get("/v1/responses/{response_id}")
    async def get_response(response_id: str) -> dict[str, Any]:
        return store.get(response_id, "response_id").response

    @router.route("/v1/responses/{response_id}", ("DELETE",))
    async def delete_response(response_id: str) -> dict[str, Any]:
        await store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/embeddings", body=f"{_HERE}.embeddings:EmbeddingRequest")
    async def post_embeddings(body: EmbeddingRequest, client: Request) -> Response:
        from aotllm.serving.openai.embeddings import embeddings

        return await embeddings(context, body, client)

    @router.get("/v1/models")
    async def get_models() -> dict[str, Any]:
        return {"object": "list", "data": models.cards()}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return models.card(name)

    return router
