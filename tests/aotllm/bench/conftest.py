from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from aotllm import Executor
from tests.aotllm.cli.command_line import CommandLine
from tests.aotllm.fake_manager import FakeManager
from tests.aotllm.serving.http_server import serving

Serve = Callable[..., str]


@pytest.fixture
def aotllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def serve(start: Callable[..., Executor]) -> Iterator[Serve]:
    """Serves one model, "m", in a thread; returns the base URL."""
    with ExitStack() as servers:

        def serve(manager: FakeManager, **options: object) -> str:
            return servers.enter_context(serving({"m": start(manager)}, **options)).removesuffix("/v1")

        yield serve
