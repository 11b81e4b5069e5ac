"""`BodyLimitMiddleware`: bounds the memory that one request body can take."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimitMiddleware:
    """Answers 413 as soon as a body is longer than `limit` bytes, whatever its headers say."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entrance."""
        taken = 0

        async def bounded_receive() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                # Raised where the application reads the body, and answered by its own handler.
                raise HTTPException(413, f"the body is longer than {self._limit} bytes")
            return message

        await self._app(scope, bounded_receive, send)
