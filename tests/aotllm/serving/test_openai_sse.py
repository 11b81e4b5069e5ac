"""Events: their encoding, failures, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotllm.errors import InvalidRequest
from aotllm.request import TokenLogprob, TokenOutput
from aotllm.serving.generation import joined
from aotllm.serving.openai.sse import TEXT, TextEvent, event, event_stream
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask, events

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


@given(text=st.text(), other=st.text(), name=st.none() | st.sampled_from(["a", "response.output_text.delta"]))
def test_a_text_event_is_the_event_of_its_value(text: str, other: str, name: str | None):
    def value(shown: str) -> dict[str, Any]:
        return {"id": other, "choices": [{"delta": {"content": shown}, "logprobs": None}]}

    assert TextEvent(value(TEXT), name)(text) == event(value(text), name)
    data = event(value(text), name).decode().removesuffix("\n\n").split("data: ", 1)[1]
    assert json.loads(data) == value(text)
    assert "\n" not in data  # a line break would end the event


def test_half_a_surrogate_pair_does_not_end_a_stream():
    assert event({"a": "x\ud800y"}) == b'data: {"a":"x?y"}\n\n'


async def values(*parts: Any) -> AsyncIterator[Any]:
    for part in parts:
        if isinstance(part, BaseException):
            raise part
        yield part


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([], ""),
        ([{"a": 1}, b"data: 2\n\n"], 'data: {"a":1}\n\ndata: 2\n\n'),
        (
            [{"a": 1}, InvalidRequest("no", "x")],
            'data: {"a":1}\n\ndata: {"error":{"message":"no","type":"BadRequestError","param":"x","code":400}}\n\n',
        ),
        (
            [ZeroDivisionError("secret")],
            'data: {"error":{"message":"a fault of the server; its log has the details",'
            '"type":"InternalServerError","param":null,"code":500}}\n\n',
        ),
    ],
)
def test_a_stream_ends_with_done_whatever_happens(parts: list[Any], text: str):
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()

    asyncio.run(event_stream(values(*parts))(SCOPE, receive, send))
    assert sent[0]["status"] == 200
    assert b"".join(message["body"] for message in sent[1:]).decode() == text + "data: [DONE]\n\n"
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]


@pytest.mark.parametrize("blocked", ["waiting for a value", "sending"])
def test_a_client_that_leaves_ends_the_iterator_at_once(blocked: str):
    ended: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        stuck, gone = asyncio.Event(), asyncio.Event()

        async def endless() -> AsyncIterator[dict[str, Any]]:
            try:
                yield {"a": 1}
                stuck.set()
                await loop.create_future()
            finally:
                ended.append("closed")

        async def send(message: dict[str, Any]) -> None:
            if blocked == "sending" and message["type"] == "http.response.body":
                stuck.set()
                await loop.create_future()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        response = asyncio.create_task(event_stream(endless())(SCOPE, receive, send))
        await stuck.wait()
        gone.set()
        await response
        assert ended == ["closed"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_joined_outputs_say_what_the_parts_said():
    def part(index: int, text: str, token: int, **fields: Any) -> TokenOutput:
        return TokenOutput(text, (token,), (TokenLogprob(token, -1.0),), index=index, **fields)

    first, second = joined(
        [
            part(1, "a", 1, prompt_logprobs=(TokenLogprob(9, -2.0),)),
            part(0, "x", 2),
            part(1, "", 3),
            part(1, "b", 4, finish_reason="stop", stop_reason="."),
        ]
    )
    assert first == TokenOutput(
        "ab",
        (1, 3, 4),
        tuple(TokenLogprob(token, -1.0) for token in (1, 3, 4)),
        finish_reason="stop",
        stop_reason=".",
        index=1,
        prompt_logprobs=(TokenLogprob(9, -2.0),),
    )
    assert second == part(0, "x", 2)


def test_a_client_that_does_not_read_slows_nobody_and_keeps_one_event_waiting(ask: Ask):
    answer = "sea " * 200
    manager = FakeManager(says(answer), stepping="by hand")
    app = ask(manager).app
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 2000}).encode()

    async def run() -> tuple[list[str], list[str]]:
        reads, sent = asyncio.Event(), ([], [])  # type: ignore[var-annotated]
        tasks = [asyncio.create_task(call(sent[number], reads if number else None)) for number in range(2)]
        await asyncio.to_thread(manager.wait_until, lambda m: len(m.running) == 2)
        while manager.running:
            manager.step_and_wait()
            for _ in range(20):
                await asyncio.sleep(0)
        await tasks[0]
        assert not tasks[1].done()
        reads.set()
        await tasks[1]
        return sent

    async def call(sent: list[str], reads: asyncio.Event | None) -> None:
        async def receive() -> dict[str, Any]:
            if not requests:
                await asyncio.get_running_loop().create_future()
            return requests.pop()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                sent.append(message["body"].decode())
                if reads is not None:
                    await reads.wait()

        requests = [{"type": "http.request", "body": body}]
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        path = "/v1/completions"
        scope = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        await app({**SCOPE, **scope, "http_version": "1.1", "scheme": "http", "server": ("x", 1)}, receive, send)

    fast, slow = asyncio.run(run())
    for parts in (fast, slow):
        assert "".join(chunk["choices"][0]["text"] for chunk in events("".join(parts))) == answer
    assert len(fast) == len(answer) + 2
    assert len(slow) == 3  # the first token, all the others together, [DONE]
