"""Nothing wakes an idle server: what it waits for are events, not the clock."""

from __future__ import annotations

import asyncio
import http.client
import threading
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from aotllm import Executor
from aotllm.serving.app import context_of
from aotllm.serving.front_end import Listeners, serve_clients
from aotllm.serving.sockets import listen
from tests.aotllm.fake_manager import FakeEngine, FakeManager


class CountedManager(FakeManager):
    """Remembers for how long it was asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.waiting = threading.Event()

    def poll(self, timeout: float) -> Any:
        self.waits.append(timeout)
        self.waiting.set()
        return super().poll(timeout)


def test_an_idle_executor_waits_once():
    manager = CountedManager()
    with Executor(FakeEngine(), manager_factory=lambda *_: manager):  # type: ignore[arg-type]
        assert manager.waiting.wait(60)
        assert len(manager.waits) == 1
        assert manager.waits[0] >= 3600


def test_no_timer_of_an_idle_server_is_set():
    async def serve() -> None:
        loop: Any = asyncio.get_running_loop()
        stop, started = asyncio.Event(), asyncio.Event()
        listeners = Listeners(listen("127.0.0.1", 0), listen("127.0.0.1", 0))
        with Executor(FakeEngine(), manager_factory=lambda *_: FakeManager()) as executor:  # type: ignore[arg-type]
            serving = asyncio.create_task(serve_clients(context_of({"m": executor}), listeners, 1.0, stop, started.set))
            await started.wait()
            date = await asyncio.to_thread(_date_of_an_answer, listeners.http.getsockname()[1])
            assert parsedate_to_datetime(date).year > 2000
            while any(not timer.cancelled() for timer in loop._scheduled if "_look" in repr(timer)):
                await asyncio.sleep(0)  # until it has seen that the client has left
            assert [timer for timer in loop._scheduled if not timer.cancelled()] == []
            stop.set()
            await serving

    asyncio.run(serve())


def _date_of_an_answer(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    (date,) = answer.headers.get_all("date") or [""]
    return date


@pytest.mark.parametrize("seconds", [[100, 100, 101]])
def test_date_follows_the_clock(monkeypatch: pytest.MonkeyPatch, seconds: list[int]):
    from types import SimpleNamespace

    from aotllm.serving import http_protocol

    protocol = http_protocol.HttpProtocol.__new__(http_protocol.HttpProtocol)
    protocol.server_state = SimpleNamespace(default_headers=[])  # type: ignore[assignment]
    protocol.config = SimpleNamespace(encoded_headers=[(b"server", b"s")])  # type: ignore[assignment]
    dates = []
    for second in seconds:
        monkeypatch.setattr(http_protocol.time, "time", lambda second=second: second + 0.5)
        protocol._tell_date()
        dates.append(dict(protocol.server_state.default_headers)[b"date"])
    assert dates == [b"Thu, 01 Jan 1970 00:01:40 GMT"] * 2 + [b"Thu, 01 Jan 1970 00:01:41 GMT"]
    assert protocol.server_state.default_headers[1:] == [(b"server", b"s")]
