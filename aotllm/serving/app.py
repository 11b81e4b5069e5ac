"""`create_app`: the HTTP side of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import aotllm
from aotllm.executor import Executor
from aotllm.serving.admission import TurnstileMiddleware
from aotllm.serving.api_key import ApiKeyMiddleware
from aotllm.serving.body_limit import BodyLimitMiddleware
from aotllm.serving.context import ServingContext
from aotllm.serving.error_responses import install_handlers
from aotllm.serving.kserve.http_routes import kserve_routes
from aotllm.serving.openai.lora_routes import lora_routes
from aotllm.serving.openai.routes import openai_routes
from aotllm.serving.openai.tokenize import tokenize_routes
from aotllm.serving.operations import operations_routes
from aotllm.serving.options import ServingOptions
from aotllm.serving.repository import LocalRepository
from aotllm.serving.request_id import RequestIdMiddleware
from aotllm.serving.status_page.routes import status_routes
from aotllm.serving.telemetry.http_metrics import HttpMetricsMiddleware
from aotllm.serving.telemetry.metrics import metrics_routes
from aotllm.serving.telemetry.serving_telemetry import ServingTelemetry

_SUBMITTING = ("/v1/", "/v2/models/")
"""Where a POST submits requests"""


def create_app(context: ServingContext) -> FastAPI:
    """An ASGI application with all routes of a server."""
    app = FastAPI(title="aotllm", version=aotllm.__version__, docs_url=None, redoc_url=None)
    install_handlers(app)
    app.add_middleware(
        TurnstileMiddleware, turnstile=context.turnstile, paths=_SUBMITTING, one_queue=lambda: context.one_queue
    )
    app.add_middleware(BodyLimitMiddleware, limit=context.options.max_body_bytes)
    if context.options.api_key:
        app.add_middleware(ApiKeyMiddleware, api_keys=context.options.api_key)
    app.add_middleware(RequestIdMiddleware)
    if context.options.allowed_origins:
        _allow_browsers(app, context.options)
    if isinstance(context.telemetry, ServingTelemetry):
        app.add_middleware(HttpMetricsMiddleware, metrics=context.telemetry.metrics)
    app.include_router(openai_routes(context))
    app.include_router(tokenize_routes(context))
    app.include_router(lora_routes(context))
    app.include_router(kserve_routes(context))
    app.include_router(operations_routes(context))
    app.include_router(metrics_routes(context))
    if context.options.status_page:
        app.include_router(status_routes(context))
    return app


def _allow_browsers(app: FastAPI, options: ServingOptions) -> None:
    # The outermost one, so that a browser can also read a refusal, and its preflight needs no key.
    app.add_middleware(
        CORSMiddleware,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=("X-Request-Id", "Retry-After"),
    )


def context_of(executors: Mapping[str, Executor], **options: Any) -> ServingContext:
    """What serves executors of this process.

    Args:
        executors: model name → executor, at least one. They stay the caller's, who shuts them down afterwards.
        options: fields of `ServingOptions`.
    """
    if not executors:
        raise ValueError("a server needs at least one executor")
    serving_options = ServingOptions(**options)
    return ServingContext(LocalRepository(executors), serving_options, ServingTelemetry(serving_options))


def app_of(executors: Mapping[str, Executor], **options: Any) -> FastAPI:
    """An application around executors of this process, for tests and for those who embed it; see `context_of`."""
    return create_app(context_of(executors, **options))
