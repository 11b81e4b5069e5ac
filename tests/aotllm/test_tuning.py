"""`tune`: what was measured becomes part of the engine, and of what the runtime is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotllm import _runtime
from aotllm.engines import open_engine
from aotllm.engines.bundle import TACTICS_FILE
from aotllm.errors import EngineError, EngineIncompatible, InvalidRequest
from aotllm.tuning import TunedStep, TunedTactic, stored_tactics, tune
from tests.engines.samples import write_engine

RECORDS = [
    {
        "format": "fp8",
        "n": 64,
        "k": 32,
        "tactics": [
            {"max_rows": 8, "kernel": "skinny.8", "seconds": 1e-5},
            {"max_rows": 512, "kernel": "tile.0", "seconds": 2e-5},
        ],
    }
]
CPU_RECORD = {
    "device": "a CPU, avx2",
    "threads": 2,
    "own_rows": 8,
    "steps": [{"max_rows": 1, "threads": 1, "seconds": 0.002, "default_seconds": 0.003}],
    "linears": [
        {
            "format": "q4_1",
            "n": 64,
            "k": 32,
            "tactics": [{"max_rows": 1, "kernel": "avx2.32x16", "seconds": 1e-5}],
        }
    ],
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the runtime's tuners, which are fakes."""
    calls: list[tuple[Any, ...]] = []

    def fake(result: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls.append(arguments)
            return result

        return call

    monkeypatch.setattr(_runtime, "tune", fake(RECORDS))
    monkeypatch.setattr(_runtime, "tune_cpu", fake(CPU_RECORD))
    return calls


def test_choices_are_kept_in_the_engine(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    write_engine(tmp_path / "engine", target="cuda")
    tuning = tune(tmp_path / "engine", device=1)
    assert measured[0][:2] == (str(tmp_path / "engine" / "rank0.engine"), 1)
    (linear,) = tuning.linears
    assert (linear.format, linear.n, linear.k) == ("fp8", 64, 32)
    assert linear.tactics[1] == TunedTactic(512, "tile.0", 2e-5)
    assert (tuning.device, tuning.threads, tuning.steps) == (None, None, ())

    engine = open_engine(tmp_path / "engine")  # all digests are right, the new file's too
    assert TACTICS_FILE in engine.manifest.files
    assert json.loads(stored_tactics(engine.path)) == {"version": 1, "linears": RECORDS}


def test_choices_for_a_cpu_say_for_which(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    write_engine(tmp_path / "engine", target="cpu")
    tuning = tune(tmp_path / "engine", num_threads=2, seconds=5.0)
    assert measured == [(str(tmp_path / "engine" / "rank0.engine"), 2, 5.0)]
    assert (tuning.device, tuning.threads, tuning.own_rows) == ("a CPU, avx2", 2, 8)
    assert tuning.steps == (TunedStep(1, 1, 0.002, 0.003),)
    engine = open_engine(tmp_path / "engine")
    assert json.loads(stored_tactics(engine.path)) == {"version": 1, **CPU_RECORD}


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_tuning_again_replaces_the_choices(tmp_path: Path, measured: list[tuple[Any, ...]], target: str) -> None:
    write_engine(tmp_path / "engine", target=target)
    for _ in range(2):
        tune(tmp_path / "engine")
    open_engine(tmp_path / "engine")
    assert len(measured) == 2


def test_an_engine_that_was_never_tuned_has_no_choices(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", target="cuda")
    assert stored_tactics(tmp_path / "engine") == ""


def test_choices_that_are_no_text_are_refused(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", target="cpu")
    (tmp_path / "engine" / TACTICS_FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(EngineError, match=r"tactics\.json: cannot be read: it is not UTF-8 text; run 'aotllm tune'"):
        stored_tactics(tmp_path / "engine")


def test_other_targets_are_refused(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    write_engine(tmp_path / "engine", target="tensorrt")
    with pytest.raises(EngineIncompatible, match="target 'tensorrt'"):
        tune(tmp_path / "engine")
    assert not measured


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("cpu", {"device": 0}, "device: got 0, but the engine is for target cpu; only cuda takes it"),
        ("cuda", {"num_threads": 2}, "num_threads: got 2, but the engine is for target cuda; only cpu takes it"),
        ("cuda", {"seconds": 2.0}, "seconds: got 2.0, but the engine is for target cuda; only cpu takes it"),
    ],
)
def test_arguments_of_the_other_target_are_refused(
    target: str, arguments: dict[str, Any], message: str, tmp_path: Path, measured: list[tuple[Any, ...]]
) -> None:
    write_engine(tmp_path / "engine", target=target)
    with pytest.raises(InvalidRequest, match=message):
        tune(tmp_path / "engine", **arguments)
    assert not measured


def test_a_folder_that_cannot_be_written_keeps_its_engine(
    tmp_path: Path, measured: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_engine(tmp_path / "engine", target="cpu")
    (tmp_path / "engine" / "tactics.new").mkdir()  # in the way of what is written first
    with pytest.raises(EngineError, match="cannot be written: Is a directory; tune a copy of the engine"):
        tune(tmp_path / "engine")
    assert TACTICS_FILE not in open_engine(tmp_path / "engine").manifest.files


@pytest.mark.skipif(_runtime.has_cuda(), reason="this build has CUDA")
def test_a_build_without_cuda_says_so(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", target="cuda")
    with pytest.raises(EngineIncompatible, match="for target cuda, .* has no CUDA; install one .*--target cpu"):
        tune(tmp_path / "engine")
