from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aotllm import Executor
from tests.aotllm.fake_manager import FakeEngine, FakeManager
from tests.aotllm.serving.http_client import Ask, Client
from tests.aotllm.serving.kserve_server import KserveServer, Serve


@pytest.fixture
def ask(start: Callable[..., Executor]) -> Ask:
    """A client of a server with one model, "m", on a fake manager."""

    def ask(manager: FakeManager, engine: FakeEngine | None = None, **options: Any) -> Client:
        return Client({"m": start(manager, engine)}, **options)

    return ask


@pytest.fixture
def kserve(start: Callable[..., Executor]) -> Iterator[Serve]:
    """Starts servers on sockets with one model, "m", on a fake manager, or with those given by name."""
    servers: list[KserveServer] = []

    def serve(manager: FakeManager | dict[str, FakeManager], **options: Any) -> KserveServer:
        managers = manager if isinstance(manager, dict) else {"m": manager}
        servers.append(KserveServer({name: start(one) for name, one in managers.items()}, **options))
        return servers[-1]

    yield serve
    for server in servers:
        server.stop()
