from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from aotllm import Executor
from tests.aotllm.fake_manager import FakeEngine, FakeManager


@pytest.fixture
def start() -> Iterator[Callable[..., Executor]]:
    """Starts an executor on a fake manager; ends all at the end of the test."""
    executors: list[Executor] = []

    def start(manager: FakeManager, engine: FakeEngine | None = None, **sizes: int) -> Executor:
        executors.append(Executor(engine or FakeEngine(), manager_factory=lambda *_: manager, **sizes))
        return executors[-1]

    yield start
    for executor in executors:
        executor.shutdown()
