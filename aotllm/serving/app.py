"""`create_app`: the routes of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

import aotllm
from aotllm.executor import Executor
from aotllm.serving.api_key import ApiKeyMiddleware
from aotllm.serving.body_limit import BodyLimitMiddleware
from aotllm.serving.chat_completions import chat_completions
from aotllm.serving.completions import completions
from aotllm.serving.errors import install_handlers
from aotllm.serving.models import ServedModels
from aotllm.serving.protocol import ChatCompletionRequest, CompletionRequest


def create_app(executors: Mapping[str, Executor], api_keys: Sequence[str] = ()) -> FastAPI:
    """An ASGI application that serves the executors with OpenAI's API.

    The executors stay the caller's: he opens them before and shuts them down after the server has run.

    Args:
        executors: model name → executor, at least one. The first one answers requests that name no model.
        api_keys: one of these must come as `Authorization: Bearer KEY` with requests under /v1; empty = open.
    """
    models = ServedModels(executors)
    app = FastAPI(title="aotllm", version=aotllm.__version__, docs_url=None, redoc_url=None)
    install_handlers(app)
    app.add_middleware(BodyLimitMiddleware)
    if api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=api_keys)

    @app.post("/v1/chat/completions", response_model=None)
    async def post_chat_completions(body: ChatCompletionRequest, client: Request) -> Response:
        return await chat_completions(models, body, client)

    @app.post("/v1/completions", response_model=None)
    async def post_completions(body: CompletionRequest, client: Request) -> Response:
        return await completions(models, body, client)

    @app.get("/v1/models")
    async def get_models() -> dict[str, Any]:
        return {"object": "list", "data": models.cards()}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return models.card(name)

    @app.get("/health", response_model=None)
    async def get_health() -> Response:
        return Response(status_code=200 if models.alive else 503)

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": aotllm.__version__}

    return app
