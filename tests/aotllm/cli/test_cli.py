"""What all verbs have in common: exit codes, one-line errors, help, start-up time's cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import aotllm as package
from aotllm.errors import ERROR_KINDS, AotllmError, InvalidRequest
from tests.aotllm.cli.command_line import CommandLine

VERBS = ("build", "run", "serve", "inspect", "verify")


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_each_kind_of_error_is_one_line_with_its_exit_code(
    aotllm: CommandLine, monkeypatch: pytest.MonkeyPatch, kind: str
):
    error = ERROR_KINDS[kind]("what was wrong:\n  this and that")
    monkeypatch.setattr("aotllm.engines.open_engine", lambda *_, **__: raise_(error))
    outcome = aotllm("verify", "x")
    assert (outcome.code, outcome.out, outcome.err) == (error.exit_code, "", "error: what was wrong: this and that\n")


def test_exit_codes_are_those_of_the_manual():
    codes = {kind: error.exit_code for kind, error in ERROR_KINDS.items()}
    assert codes == {
        "invalid_request": 2,
        "context_too_long": 2,
        "overloaded": 5,
        "unavailable": 1,
        "timed_out": 5,
        "checkpoint": 3,
        "unsupported_model": 3,
        "engine": 3,
        "engine_incompatible": 4,
        "cancelled": 1,
        "internal": 1,
    }


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
        (
            ZeroDivisionError("oh"),
            1,
            "error: ZeroDivisionError: oh (a fault of aotllm; AOTLLM_TRACEBACK=1 shows where)\n",
        ),
    ],
)
def test_other_failures(
    aotllm: CommandLine, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
):
    monkeypatch.setattr("aotllm.engines.open_engine", lambda *_, **__: raise_(error))
    monkeypatch.setattr("aotllm.cli.silence_stdout", lambda: None)
    outcome = aotllm("verify", "x")
    assert (outcome.code, outcome.out, outcome.err) == (code, "", text)


def test_a_traceback_is_there_for_those_who_want_it(aotllm: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AOTLLM_TRACEBACK", "1")
    monkeypatch.setattr("aotllm.engines.open_engine", lambda *_, **__: raise_(InvalidRequest("no")))
    with pytest.raises(AotllmError, match="no"):
        aotllm("verify", "x")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["build"],
        ["build", "model"],
        ["build", "model", "-o", "out", "--max-seq-len", "many"],
        ["build", "model", "-o", "out", "--fp8", "--quantize", "int8"],
        ["run"],
        ["run", "x", "--nope"],
        ["run", "x", "--json"],
        ["run", "x", "-p", "a", "--length-penalty", "2"],
        ["run", "x", "-p", "a", "--beam-width", "0"],
        ["run", "x", "-p", "a", "--lora", "poet"],
        ["run", "x", "-p", "a", "--lora", "a=b", "--lora", "c=d"],
        ["run", "x", "-p", "a", "--kv-cache-memory", "some"],
        ["run", "x", "-p", "a", "--timeout", "-1"],
        ["serve", "a", "--queue-policy", "random"],
        ["serve", "a", "--lora", "a=b"],
        ["serve", "a", "--lora", "x=b", "--lora", "x=c"],
        ["serve", "a", "b", "--lora", "x=y"],
        ["run", "x", "--raw", "--system", "s", "-p", "a"],
        ["serve"],
        ["serve", "a", "--http-port", "70000"],
        ["serve", "a", "--max-queue-size", "-1"],
        ["serve", "a", "b", "--served-model-name", "one"],
        ["serve", "x/a", "y/a"],
    ],
)
def test_wrong_usage_is_2_and_one_line(aotllm: CommandLine, arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("aotllm.engines.open_engine", lambda *_, **__: raise_(AssertionError("must not get this far")))
    outcome = aotllm(*arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert outcome.err.startswith("error: ")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(aotllm: CommandLine, verb: str):
    outcome = aotllm(verb, "--help")
    assert outcome.code == 0
    assert "--json" in outcome.out


def test_no_arguments_show_the_verbs(aotllm: CommandLine):
    outcome = aotllm()
    assert outcome.code == 2
    assert all(verb in outcome.out for verb in VERBS)


def test_version(aotllm: CommandLine):
    outcome = aotllm("--version")
    assert (outcome.code, outcome.out) == (0, f"aotllm {package.__version__}\n")


def test_a_missing_engine_is_an_engine_error(aotllm: CommandLine, tmp_path: Path):
    for verb in ("inspect", "verify", "run"):
        outcome = aotllm(verb, tmp_path / "none")
        assert outcome.code == 3
        assert "does not exist" in outcome.err


def test_the_module_runs_and_help_imports_nothing_heavy():
    program = (
        "import runpy, sys; sys.argv = ['aotllm', '--help']\n"
        "try: runpy.run_module('aotllm', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'numpy', 'pydantic', 'rich', 'starlette', 'tokenizers', 'jinja2', 'onnx_ir', 'aotllm._runtime'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
