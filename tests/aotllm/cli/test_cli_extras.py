"""What the command line does where an extra is not installed: help of everything, and one sentence each."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SERVE = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "grpc", "google", "prometheus_client")
TRACING = ("opentelemetry.sdk", "opentelemetry.exporter")
RAY = ("ray",)

# Without packages, runs one command line after the other; prints of each [exit code, stdout, stderr].
PROGRAM = """
import contextlib, io, json, sys
missing, command_lines = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(missing)
from aotllm.cli import main
ends = []
for line in command_lines:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line)
    ends.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(ends))
"""


def ends(missing: tuple[str, ...], *command_lines: list[str]) -> list[tuple[int, str, str]]:
    command = [sys.executable, "-c", PROGRAM, json.dumps([missing, command_lines])]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [tuple(end) for end in json.loads(ran.stdout)]


def test_help_needs_no_extra():
    verbs: list[list[str]] = [[], ["serve"], ["bench"], ["bench", "serve"], ["export-triton"]]
    shown = ends((*SERVE, *TRACING, *RAY), *([*verb, "--help"] for verb in verbs))
    for verb, (code, out, err) in zip(verbs, shown, strict=True):
        assert (code, err) == (0, ""), verb
        assert out.startswith(" ".join(["Usage: aotllm", *verb])), verb


BENCH = ["bench", "serve", "--url", "http://127.0.0.1:1", "--num-prompts", "1"]


@pytest.mark.parametrize(
    ("missing", "command_line", "extra"),
    [
        (SERVE, ["serve", "x"], "serve"),
        (SERVE, ["serve", "x", "--frontends", "0"], "serve"),
        (SERVE, BENCH, "bench"),
        (("grpc",), [*BENCH, "--backend", "kserve-grpc"], "bench"),
        (RAY, ["serve", "x", "--ray"], "ray"),
        (TRACING, ["serve", "x", "--otlp-endpoint", "http://127.0.0.1:1"], "tracing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_missing_extra_is_one_sentence_that_says_what_to_install(
    missing: tuple[str, ...], command_line: list[str], extra: str
):
    ((code, out, err),) = ends(missing, command_line)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ")
    assert err.endswith(f"pip install 'aotllm[{extra}]'\n")


@pytest.mark.parametrize("missing", SERVE)
def test_every_package_of_the_server_is_asked_for(monkeypatch: pytest.MonkeyPatch, missing: str):
    from aotllm.errors import AotllmError
    from aotllm.serving import check_installed

    modules: dict[str, Any] = {name: None for name in sys.modules if name.split(".")[0] == missing}
    for name in {missing, *modules}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AotllmError, match=missing):
        check_installed()
