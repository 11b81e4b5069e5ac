from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from aotllm.errors import Overloaded
from aotllm.serving import admission
from aotllm.serving.admission import TURN, WIDTH, Turnstile, TurnstileMiddleware


@pytest.fixture(autouse=True)
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are left by those who took them, unless a test says otherwise."""
    monkeypatch.setattr(admission, "HOLD_SECONDS", 1000.0)


class Work:
    """An application that submits when it is told to."""

    def __init__(self, submits: bool = True) -> None:
        self.begun: list[str] = []
        self.go = asyncio.Event()
        self._submits = submits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append(scope["path"])
        if self._submits:
            scope[TURN].leave()
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def client_of(app: Any, one_queue: bool = True) -> tuple[httpx.AsyncClient, Turnstile]:
    turnstile = Turnstile()
    middleware = TurnstileMiddleware(app, turnstile, ("/v1/",), lambda: one_queue)
    return httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://test"), turnstile


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_no_more_than_the_width_are_inside_and_the_others_come_in_order():
    async def main() -> None:
        work = Work(submits=False)
        client, _ = client_of(work)
        posts = [asyncio.create_task(client.post(f"/v1/{i}")) for i in range(3 * WIDTH)]
        await until(lambda: len(work.begun) == WIDTH)
        for _ in range(50):
            await asyncio.sleep(0)
        assert work.begun == [f"/v1/{i}" for i in range(WIDTH)]
        work.go.set()
        await asyncio.gather(*posts)
        assert work.begun == [f"/v1/{i}" for i in range(3 * WIDTH)]

    asyncio.run(main())


def test_a_turn_is_left_when_the_request_has_been_submitted_not_when_it_ends():
    async def main() -> None:
        work = Work()
        client, _ = client_of(work)
        posts = [asyncio.create_task(client.post("/v1/x")) for _ in range(3 * WIDTH)]
        await until(lambda: len(work.begun) == 3 * WIDTH)
        work.go.set()
        await asyncio.gather(*posts)

    asyncio.run(main())


def test_a_request_that_takes_long_holds_up_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admission, "HOLD_SECONDS", 0.0)

    async def main() -> None:
        work = Work(submits=False)
        client, _ = client_of(work)
        posts = [asyncio.create_task(client.post("/v1/x")) for _ in range(3 * WIDTH)]
        await until(lambda: len(work.begun) == 3 * WIDTH)
        work.go.set()
        await asyncio.gather(*posts)

    asyncio.run(main())


def test_those_who_leave_while_they_wait_give_their_turn_on():
    async def main() -> None:
        turnstile = Turnstile()
        turns = [await turnstile.enter() for _ in range(WIDTH)]
        waiting = [asyncio.create_task(turnstile.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # while it waits
        await asyncio.sleep(0)
        turns[0].leave()
        waiting[1].cancel()  # when its turn has come, but it does not know yet
        assert (await waiting[2]) is not None
        for turn in (*turns[1:], waiting[2].result()):
            turn.leave()
        again = [await asyncio.wait_for(turnstile.enter(), 60) for _ in range(WIDTH)]
        assert len(again) == WIDTH

    asyncio.run(main())


@pytest.mark.parametrize(("one_queue", "status"), [(True, 503), (False, 200)])
def test_after_a_refusal_others_are_refused_without_asking_if_they_would_ask_the_same_queue(
    one_queue: bool, status: int, monkeypatch: pytest.MonkeyPatch
):
    now = 100.0
    monkeypatch.setattr(admission.time, "monotonic", lambda: now)

    async def main() -> None:
        nonlocal now
        work = Work()
        work.go.set()
        client, turnstile = client_of(work, one_queue)
        turnstile.refused(Overloaded("the queue is full", retry_after=2.0))
        answer = await client.post("/v1/x")
        assert answer.status_code == status
        assert len(work.begun) == (status == 200)
        if status == 503:
            assert answer.headers["retry-after"] == "2"
        now += admission.REFUSE_SECONDS
        assert (await client.post("/v1/x")).status_code == 200

    asyncio.run(main())
