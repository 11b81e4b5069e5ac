"""The command line in this process, with the engine and its manager faked."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import pytest

from aotllm.cli import main
from tests.aotllm.fake_manager import FakeEngine, FakeManager


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value on stdout."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


class CommandLine:
    """Calls `main` as a shell would.

    `engine` and `manager` are what `run` and `serve` find in place of a real engine.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.delenv("AOTLLM_TRACEBACK", raising=False)

    def use(self, manager: FakeManager, engine: FakeEngine | None = None) -> FakeManager:
        self._monkeypatch.setattr("aotllm.engines.open_engine", lambda path, verify=True: engine or FakeEngine())
        self._monkeypatch.setattr("aotllm.loaded_engine.RuntimeManager", lambda *_: manager)
        return manager

    def __call__(self, *arguments: object, stdin: str = "") -> Outcome:
        self._monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        return Outcome(code, captured.out, captured.err)
