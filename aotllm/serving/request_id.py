"""`RequestIdMiddleware`: one id per HTTP request, for the client, the log and traces."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aotllm.serving.call import REQUEST_ID

_NAME = b"x-request-id"


class RequestIdMiddleware:
    """Sends the client's own `X-Request-Id` back, or one of ours where it brings none that can stand in a header or a
    line of a log. Behind it, requests always have one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entrance."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
            headers = [(name, value) for name, value in scope["headers"] if name.lower() != _NAME]
            # In place, so that the answer to a fault, which is made outside of this, has it, too.
            scope["headers"] = [*headers, (_NAME, request_id.encode())]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
