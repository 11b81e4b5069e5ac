"""`ApiKeyMiddleware`: requests that use a model need a key; health, metrics and version stay open."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_GUARDED = ("/v1", "/v2", "/tokenize", "/detokenize")


class ApiKeyMiddleware:
    """Answers 401 unless `Authorization: Bearer KEY` brings one of the keys."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entrance."""
        if _is_guarded(scope) and not self._allows(Headers(scope=scope).get("authorization", "")):
            headers = {"WWW-Authenticate": "Bearer"}
            await JSONResponse({"error": "Unauthorized"}, 401, headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Compare with every key, each in constant time, so that the time taken tells nothing.
        matches = [secrets.compare_digest(token.strip().encode(), key) for key in self._keys]
        return any(matches)


def _is_guarded(scope: Scope) -> bool:
    if scope["type"] != "http":
        return bool(scope["type"] == "websocket")
    # Kubernetes' probes bring no keys.
    path: str = scope["path"]
    is_probe = path.startswith("/v2/health/") or (path.startswith("/v2/models/") and path.endswith("/ready"))
    guarded: bool = path.startswith(_GUARDED) and not is_probe
    return guarded
