from __future__ import annotations

import logging
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


@pytest.fixture
def own_loggers() -> Iterator[None]:
    """Loggers as in a process that has set none up; what a test does to them is undone, for their handlers keep the
    standard error of that test."""
    loggers = [logging.getLogger(name) for name in ("aotllm", "aotllm.request")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    for logger in loggers:
        logger.handlers.clear()
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers
