"""Streams of a front end on a connection that takes parts of an answer at once: the same bytes as without."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from aotllm.serving.app import create_app
from aotllm.serving.context import ServingContext
from aotllm.serving.openai.sse import WRITE
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import events
from tests.aotllm.serving.process.engine_group import Group, Run

TEXT = "Grüße aus Übersee, 🌊! "
HI = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "a"}),
    "completions of two prompts": ("/v1/completions", {"prompt": ["a", "b"]}),
    "two answers": ("/v1/completions", {"prompt": "a", "n": 2}),
    "with counts": ("/v1/completions", {"prompt": "a", "stream_options": {"continuous_usage_stats": True}}),
    "with log-probabilities": ("/v1/completions", {"prompt": "a", "logprobs": 1}),
    "with a stop string": ("/v1/completions", {"prompt": "a", "stop": "see, 🌊"}),
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "chat of two answers": ("/v1/chat/completions", {"messages": HI, "n": 2}),
    "chat with reasoning": ("/v1/chat/completions", {"messages": HI, "include_reasoning": False}),
}
WRITERS: dict[str, Callable[[int], bool]] = {
    "takes all": lambda _: True,
    "takes every third": lambda number: number % 3 == 0,
    "takes none": lambda _: False,
}


async def streamed(
    app: Any, manager: FakeManager, path: str, body: dict[str, Any], takes: Callable[[int], bool] | None
) -> tuple[str, int]:
    """The body of the answer, and how many parts of it came by the shortcut."""
    parts: list[bytes] = []
    numbers, written = itertools.count(), 0

    def write(part: bytes) -> bool:
        nonlocal written
        if takes is None or not takes(next(numbers)):
            return False
        written += 1
        parts.append(part)
        return True

    data = json.dumps({"max_tokens": 200, "stream": True, **body}).encode()
    messages = [{"type": "http.request", "body": data}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
        else:
            parts.append(message["body"])

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    task = asyncio.ensure_future(
        app(scope if takes is None else {**scope, "extensions": {WRITE: write}}, receive, send)
    )
    while not task.done():
        manager.step_and_wait()
        for _ in range(30):  # turns of the loop, of which a token takes some on its way
            await asyncio.sleep(0)
    task.result()
    return b"".join(parts).decode(), written


def shown(text: str) -> list[Any]:
    """What each choice was told, without what differs from one call to the next, and however it fell into events."""
    told: dict[int, dict[str, Any]] = {}
    for event in events(text):
        for choice in event["choices"]:
            end = told.setdefault(choice["index"], {"text": "", "finish": None, "logprobs": [], "events": 0})
            end["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            end["finish"] = end["finish"] or choice["finish_reason"]
            if choice.get("logprobs"):
                end["logprobs"] += choice["logprobs"].get("tokens", [])
    return sorted(told.items())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_stream_says_the_same_by_the_shortcut(run: Run, request_name: str, writer: str):
    path, body = REQUESTS[request_name]
    manager = FakeManager(says(TEXT), stepping="by hand")

    async def test(group: Group) -> None:
        app = create_app(ServingContext(await group.front_end()))
        plain, _ = await streamed(app, manager, path, body, None)
        short, written = await streamed(app, manager, path, body, WRITERS[writer])
        assert shown(short) == shown(plain)
        assert short.count("data: ") >= written
        if request_name in ("completion", "chat") and writer == "takes all":
            assert written > 0

    run(test, manager)
