"""`create_app`: the HTTP side of a server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aotllm.serving.admission import TurnstileMiddleware
from aotllm.serving.api_key import ApiKeyMiddleware
from aotllm.serving.body_limit import BodyLimitMiddleware
from aotllm.serving.context import ServingContext
from aotllm.serving.error_responses import ERROR_HANDLERS
from aotllm.serving.operations import operations_routes
from aotllm.serving.options import ServingOptions
from aotllm.serving.request_id import RequestIdMiddleware
from aotllm.serving.router import LazyRoutes, Router, imported
from aotllm.serving.telemetry.http_metrics import HttpMetricsMiddleware
from aotllm.serving.telemetry.serving_telemetry import ServingTelemetry

if TYPE_CHECKING:
    from aotllm.executor import Executor

_SUBMITTING = ("/v1/", "/v2/models/")
"""Where a POST submits requests"""
_GROUPS: dict[tuple[str, ...], str] = {
    ("/v1/tokenize", "/v1/detokenize", "/tokenize", "/detokenize"): "aotllm.serving.openai.tokenize:tokenize_routes",
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"): "aotllm.serving.openai.lora_routes:lora_routes",
    ("/v1/",): "aotllm.serving.openai.routes:openai_routes",
    ("/v2",): "aotllm.serving.kserve.http_routes:kserve_routes",
    ("/metrics",): "aotllm.serving.telemetry.metrics:metrics_routes",
}
"""First words of paths → what makes their routes, of which a server may never be asked; the first that fits counts"""
_STATUS_GROUP: dict[tuple[str, ...], str] = {("/status", "/"): "aotllm.serving.status_page.routes:status_routes"}


def create_app(context: ServingContext) -> Starlette:
    """An ASGI application with all routes of a server."""
    operations, groups = operations_routes(context).routes, _groups(context)
    app = Starlette(routes=[*operations, *groups], exception_handlers=ERROR_HANDLERS)

    async def get_openapi(_: Request) -> Response:
        from aotllm.serving.openapi import openapi_document

        return JSONResponse(openapi_document([*operations, *(route for group in groups for route in group.routes)]))

    app.add_route("/openapi.json", get_openapi, ["GET"])
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
    return app


def _groups(context: ServingContext) -> list[LazyRoutes]:
    table = {**_GROUPS, **_STATUS_GROUP} if context.options.status_page else _GROUPS
    return [LazyRoutes(prefixes, partial(_routes, name, context)) for prefixes, name in table.items()]


def _routes(name: str, context: ServingContext) -> Router:
    router: Router = imported(name)(context)
    return router


def _allow_browsers(app: Starlette, options: ServingOptions) -> None:
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
    from aotllm.serving.repository import LocalRepository

    serving_options = ServingOptions(**options)
    return ServingContext(LocalRepository(executors), serving_options, ServingTelemetry(serving_options))


def app_of(executors: Mapping[str, Executor], **options: Any) -> Starlette:
    """An application around executors of this process, for tests and for those who embed it; see `context_of`."""
    return create_app(context_of(executors, **options))
