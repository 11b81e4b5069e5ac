"""The routes under /v1."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from aotllm.serving.context import ServingContext
from aotllm.serving.openai.chat_completions import chat_completions
from aotllm.serving.openai.completions import completions
from aotllm.serving.openai.embeddings import EmbeddingRequest, embeddings
from aotllm.serving.openai.protocol import ChatCompletionRequest, CompletionRequest
from aotllm.serving.openai.response_store import ResponseStore
from aotllm.serving.openai.responses import responses
from aotllm.serving.openai.responses_protocol import ResponsesRequest


def openai_routes(context: ServingContext) -> APIRouter:
    """Everything of OpenAI's API that is served."""
    router = APIRouter()
    models = context.models
    store = ResponseStore(context.responses, context.options.max_stored_responses)

    @router.post("/v1/chat/completions", response_model=None)
    async def post_chat_completions(body: ChatCompletionRequest, client: Request) -> Response:
        return await chat_completions(context, body, client)

    @router.post("/v1/completions", response_model=None)
    async def post_completions(body: CompletionRequest, client: Request) -> Response:
        return await completions(context, body, client)

    @router.post("/v1/responses", response_model=None)
    async def post_responses(body: ResponsesRequest, client: Request) -> Response:
        return await responses(context, store, body, client)

    @router.get("/v1/responses/{response_id}")
    async def get_response(response_id: str) -> dict[str, Any]:
        return store.get(response_id, "response_id").response

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        await store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/embeddings", response_model=None)
    async def post_embeddings(body: EmbeddingRequest, client: Request) -> Response:
        return await embeddings(context, body, client)

    @router.get("/v1/models")
    async def get_models() -> dict[str, Any]:
        return {"object": "list", "data": models.cards()}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return models.card(name)

    return router
