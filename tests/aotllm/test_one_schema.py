"""A sampling field that is declared once is there for Python, HTTP and the command line."""

from __future__ import annotations

import pytest

from aotllm import SamplingParams
from aotllm.parameters import parameters
from aotllm.serving.openai.protocol import ChatCompletionRequest, CompletionRequest
from tests.aotllm.cli.command_line import CommandLine

FIELDS = [name for name, _, _ in parameters(SamplingParams)]


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize("field", FIELDS)
def test_http(model: type[CompletionRequest], field: str):
    assert field in model.model_fields


@pytest.mark.parametrize("field", FIELDS)
def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], field: str):
    outcome = CommandLine(monkeypatch, capsys)("run", "--help")
    assert f"--{field.replace('_', '-')}" in outcome.out
