"""`aotllm build`: what it passes on and what it prints; the build itself is tested under tests/builder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aotllm.builder.options import BuildOptions
from aotllm.errors import CheckpointError
from tests.aotllm.cli.command_line import CommandLine


class FakeBuild(ModuleType):
    """In place of `aotllm.builder.build`."""

    def __init__(self) -> None:
        super().__init__("aotllm.builder.build")
        self.failure: Exception | None = None
        self.called_with: tuple[Any, ...] = ()

    def build(self, model: str, output: Path, options: BuildOptions, progress: Any) -> SimpleNamespace:
        options.validate()
        self.called_with = (model, output, options)
        for done in (1, 2):
            progress(SimpleNamespace(stage="pack", done=done, total=2))
        if self.failure is not None:
            raise self.failure
        manifest = SimpleNamespace(model_dump=lambda mode: {"schema_version": 1})
        return SimpleNamespace(path=output, bytes=3 << 20, seconds=1.5, stage_seconds={"pack": 1.0}, manifest=manifest)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    module = FakeBuild()
    monkeypatch.setitem(sys.modules, "aotllm.builder.build", module)
    monkeypatch.setattr("aotllm.builder.build", module, raising=False)
    return module


def test_flags_are_the_options(aotllm: CommandLine, builder: FakeBuild):
    flags = ["--dtype", "f16", "--max-batch-size", 4, "--max-seq-len", 128, "--max-num-tokens", 32, "--force"]
    assert aotllm("build", "model.gguf", "-o", "out", *flags).code == 0
    options = BuildOptions(dtype="f16", max_batch_size=4, max_seq_len=128, max_num_tokens=32, force=True)
    assert builder.called_with == ("model.gguf", Path("out"), options)


def test_defaults_are_those_of_the_options(aotllm: CommandLine, builder: FakeBuild):
    aotllm("build", "m", "-o", "out")
    assert builder.called_with[2] == BuildOptions()


def test_progress_without_a_terminal_is_plain_lines_on_stderr(aotllm: CommandLine, builder: FakeBuild):
    outcome = aotllm("build", "m", "-o", "out")
    assert (outcome.code, outcome.out, outcome.err) == (0, "out: 3.0 MiB in 1.5 s\n", "Packing weights: done\n")


def test_json_is_one_object_and_nothing_else(aotllm: CommandLine, builder: FakeBuild):
    outcome = aotllm("build", "m", "-o", "out", "--json")
    assert outcome.err == ""
    assert outcome.json == {
        "engine": "out",
        "seconds": 1.5,
        "stage_seconds": {"pack": 1.0},
        "bytes": 3 << 20,
        "manifest": {"schema_version": 1},
    }


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--dtype", "f8"], 2),
        (["--tp", "0"], 2),
        (["--fp8"], 2),
        (["--target", "cuda", "--fp8-scales", "search"], 2),
        (["--target", "cuda", "--fp8", "--fp8-scales", "least"], 2),
        (["--target", "tensorrt"], 3),
        (["--target", "cuda", "--sm", "70"], 2),
        (["--quantize-group", "64"], 2),
        (["--quantize", "int4", "--quantize-group", "16"], 2),
        (["--report-perplexity", "no-such-file"], 2),
        (["--report-perplexity", "/", "--target", "cuda"], 2),
        (["--quantize", "int3"], 2),
        (["--max-num-tokens", "1"], 2),
    ],
)
def test_options_that_cannot_be(aotllm: CommandLine, builder: FakeBuild, flags: list[str], code: int):
    outcome = aotllm("build", "m", "-o", "out", *flags)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("error: ")


def test_a_failed_build(aotllm: CommandLine, builder: FakeBuild):
    builder.failure = CheckpointError("m: truncated")
    outcome = aotllm("build", "m", "-o", "out", "--json")
    assert (outcome.code, outcome.out, outcome.err) == (3, "", "error: m: truncated\n")
