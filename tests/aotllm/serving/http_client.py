"""Calls to the application in this process, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from aotllm.serving import app_of
from tests.aotllm.fake_manager import FakeManager

Ask = Callable[..., "Client"]


class Client:
    """Synchronous requests to an app around the given executors."""

    def __init__(self, executors: dict[str, Any], **options: Any) -> None:
        self.executors = executors
        self.app = app_of(executors, **options)

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

    def post_in_steps(self, manager: FakeManager, path: str, body: Any, requests: int = 1) -> StreamedResponse:
        """A POST to a server whose manager steps by hand: it steps whenever all tokens have been sent, so that how
        they fall into events is certain. The first step waits until all `requests` of the body are submitted."""
        return asyncio.run(_in_steps(self.app, manager, path, json.dumps(body).encode(), requests))


@dataclass
class StreamedResponse:
    """What an application has sent."""

    status_code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


async def _in_steps(app: Any, manager: FakeManager, path: str, body: bytes, requests: int) -> StreamedResponse:
    response = StreamedResponse()
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            response.status_code = message["status"]
            response.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            response.parts.append(message["body"].decode())

    scope = {
        "type": "http",
        "asgi": {"spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    task = asyncio.ensure_future(app(scope, receive, send))
    while len(manager.submitted) < requests and not task.done():
        await asyncio.sleep(0)  # prompts are tokenized by other threads
    while not task.done():
        manager.step_and_wait()  # while it blocks the loop, tokens that a step makes together stay together
        for _ in range(20):  # turns of the loop, of which handing a token on takes a few
            await asyncio.sleep(0)
    task.result()
    return response


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]
