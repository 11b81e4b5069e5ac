"""`aotllm tune`: what it passes on and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotllm.tuning import TunedLinear, TunedStep, TunedTactic, Tuning
from tests.aotllm.cli.command_line import CommandLine

LINEARS = (TunedLinear("q4_1", 960, 576, (TunedTactic(8, "k.1", 2.5e-5), TunedTactic(512, "k.2", 1e-3))),)
STEPS = (TunedStep(1, 8, 0.002, 0.003), TunedStep(256, 16, 0.05, 0.05))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []

    def tune(path: Path, *arguments: Any) -> Tuning:
        seen.append((path, *arguments))
        if path.name == "cuda":
            return Tuning(LINEARS)
        return Tuning(() if path.name == "default" else LINEARS, "a CPU, avx2", 16, 32, STEPS)

    monkeypatch.setattr("aotllm.tuning.tune", tune)
    return seen


def test_a_table_of_what_was_chosen(aotllm: CommandLine, calls: list[tuple[Any, ...]]) -> None:
    outcome = aotllm("tune", "cuda")
    assert calls == [(Path("cuda"), None, None, None)]
    assert (outcome.code, outcome.err) == (0, "")
    heading, first, second = outcome.out.splitlines()
    assert heading.split() == ["format", "matrix", "rows", "kernel", "µs"]
    assert first.split() == ["q4_1", "960", "×", "576", "8", "k.1", "25.0"]
    assert second.split()[-3:] == ["512", "k.2", "1000.0"]


def test_steps_of_a_cpu_say_what_is_gained(aotllm: CommandLine, calls: list[tuple[Any, ...]]) -> None:
    device, heading, first, second, *linears = aotllm("tune", "cpu").out.splitlines()
    assert device == "a CPU, avx2; 16 threads; rows are a thread's own from 32 each"
    assert heading.split() == ["rows", "threads", "default", "ms", "tuned", "ms", "gain"]
    assert first.split() == ["1", "8", "3.000", "2.000", "50.0%"]
    assert second.split() == ["256", "16", "50.000", "50.000", "0.0%"]
    assert len(linears) == 3
    assert aotllm("tune", "default").out.splitlines()[4:] == [
        "No other kernel than the default is faster for any matrix."
    ]


def test_flags_and_json(aotllm: CommandLine, calls: list[tuple[Any, ...]]) -> None:
    outcome = aotllm("tune", "cpu", "--num-threads", 16, "--seconds", 5, "--json")
    assert calls == [(Path("cpu"), None, 16, 5.0)]
    (linear,) = outcome.json["linears"]
    assert linear["tactics"][0]["kernel"] == "k.1"
    assert (outcome.json["device"], outcome.json["threads"], outcome.json["own_rows"]) == ("a CPU, avx2", 16, 32)
    assert outcome.json["steps"][0]["default_seconds"] == 0.003
    assert set(aotllm("tune", "cuda", "--json").json) == {"engine", "linears"}


@pytest.mark.parametrize("flags", [("--num-threads", 0), ("--seconds", 0), ("--device", -1)])
def test_wrong_usage(aotllm: CommandLine, calls: list[tuple[Any, ...]], flags: tuple[str, int]) -> None:
    assert aotllm("tune", "engine", *flags).code == 2
    assert not calls
