"""`ApiKeyMiddleware`: requests under /v1 need a key; health and version stay open."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class ApiKeyMiddleware:
    """Answers 401 unless `Authorization: Bearer KEY` brings one of the keys."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entrance."""
        guarded = scope["type"] == "http" and scope["path"].startswith("/v1") and scope["method"] != "OPTIONS"
        if guarded and not self._allows(Headers(scope=scope).get("authorization", "")):
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Compare with every key, each in constant time, so that the time taken tells nothing.
        matches = [secrets.compare_digest(token.strip().encode(), key) for key in self._keys]
        return any(matches)
