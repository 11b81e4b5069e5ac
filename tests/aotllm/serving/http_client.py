"""Calls to the application in this process, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from aotllm.serving import create_app

Ask = Callable[..., "Client"]


class Client:
    """Synchronous requests to an app around the given executors."""

    def __init__(self, executors: dict[str, Any], **options: Any) -> None:
        self.app = create_app(executors, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(call())


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]
