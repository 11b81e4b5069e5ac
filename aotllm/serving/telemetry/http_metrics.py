"""`HttpMetricsMiddleware`: counts HTTP requests by how they were answered, those too that reach no engine."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aotllm.serving.telemetry.request_metrics import RequestMetrics

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetricsMiddleware:
    """The outermost one, so that it sees what others refuse. Labels come from a fixed set, whatever clients send: the
    template of a route instead of the path, `none` for what met no route."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entrance."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # the client left before there was an answer

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            status = 500
            raise
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "OTHER"
            route = getattr(scope.get("route"), "path", None) or "none"
            self._metrics.count_http(method, route, status)
