from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aotllm import Executor
from tests.aotllm.fake_manager import FakeEngine, FakeManager
from tests.aotllm.serving.http_client import Ask, Client


@pytest.fixture
def ask(start: Callable[..., Executor]) -> Ask:
    """A client of a server with one model, "m", on a fake manager."""

    def ask(manager: FakeManager, engine: FakeEngine | None = None, **options: Any) -> Client:
        return Client({"m": start(manager, engine)}, **options)

    return ask
