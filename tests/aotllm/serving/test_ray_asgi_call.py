"""A request that goes through an application elsewhere comes out as if it had been asked here."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from aotllm import Executor
from aotllm.serving import app_of
from aotllm.serving.ray.asgi_call import HttpCall, messages, response_parts
from tests.aotllm.fake_manager import FakeManager, says

Start = Callable[..., Executor]


def call(path: str = "/v1/completions", body: bytes = b"", method: str = "POST") -> HttpCall:
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("10.0.0.1", 4242),
    }
    return pickle.loads(pickle.dumps(HttpCall.of(scope, body)))


async def collect(app: Any, request: HttpCall) -> list[Any]:
    return [message async for message in messages(app, request)]


def test_an_answer_comes_out_whole(start: Start):
    app = app_of({"m": start(FakeManager(says("hello")))})
    head, *rest = asyncio.run(collect(app, call(body=b'{"model": "m", "prompt": "x"}')))
    status, headers = response_parts(head)
    assert status == 200
    assert dict(headers)[b"content-type"] == b"application/json"
    assert b'"text":"hello"' in b"".join(message.get("body", b"") for message in rest).replace(b'": "', b'":"')


def test_a_stream_comes_out_while_it_goes_on(start: Start):
    manager = FakeManager(says("hello"), stepping="by hand")
    app = app_of({"m": start(manager)})

    async def read() -> tuple[bytes, bytes]:
        stream = messages(app, call(body=b'{"model": "m", "prompt": "x", "stream": true}'))
        assert (await anext(stream))["type"] == "http.response.start"
        await asyncio.to_thread(manager.wait_until, lambda m: len(m.running) == 1)
        manager.step()
        first = (await anext(stream))["body"]
        manager.step(5)
        return first, b"".join([message.get("body", b"") async for message in stream])

    first, rest = asyncio.run(asyncio.wait_for(read(), 60))
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in (first + rest).split(b"\n\n")[:-2]]
    assert first.startswith(b"data: {")
    assert (texts[0], "".join(texts)) == ("h", "hello")
    assert rest.endswith(b"data: [DONE]\n\n")


def test_who_stops_reading_ends_the_request(start: Start):
    manager = FakeManager(lambda _: iter(int, 1), stepping="by hand", max_seq_len=100_000)
    app = app_of({"m": start(manager)})

    async def leave() -> None:
        stream = messages(app, call(body=b'{"model": "m", "prompt": "x", "stream": true}'))
        assert (await anext(stream))["type"] == "http.response.start"
        await asyncio.to_thread(manager.wait_until, lambda m: len(m.running) == 1)
        manager.step()
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    manager.wait_until(lambda m: 1 in m.cancelled)


def test_a_fault_of_the_application_comes_out():
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(collect(broken, call()))


def test_an_application_far_ahead_is_held_back_and_then_let_go():
    sent, ends = [], []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                sent.append(1)
        finally:
            ends.append(len(sent))

    async def leave() -> None:
        stream = messages(endless, call())
        await anext(stream)
        leaving = asyncio.create_task(stream.aclose())
        _, hanging = await asyncio.wait([leaving], timeout=60)
        assert not hanging

    asyncio.run(leave())
    assert len(ends) == 1
    assert len(sent) < 1000
