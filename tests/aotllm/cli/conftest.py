from __future__ import annotations

import pytest

from tests.aotllm.cli.command_line import CommandLine


@pytest.fixture
def aotllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_loggers: None) -> CommandLine:
    return CommandLine(monkeypatch, capsys)
