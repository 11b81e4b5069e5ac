"""`tune`: what the GPU measured becomes part of the engine, and of what the runtime is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotllm import _runtime
from aotllm.engines import open_engine
from aotllm.engines.bundle import TACTICS_FILE
from aotllm.errors import EngineIncompatible
from aotllm.manager import _tactics
from aotllm.tuning import TunedTactic, tune
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


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the runtime's tuner, which is a fake."""
    calls: list[tuple[Any, ...]] = []

    def fake(*arguments: Any) -> list[dict[str, Any]]:
        calls.append(arguments)
        return RECORDS

    monkeypatch.setattr(_runtime, "has_cuda", lambda: True)
    monkeypatch.setattr(_runtime, "tune", fake, raising=False)
    return calls


def test_choices_are_kept_in_the_engine(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    write_engine(tmp_path / "engine", target="cuda")
    (linear,) = tune(tmp_path / "engine", device=1)
    assert measured[0][:2] == (str(tmp_path / "engine" / "rank0.engine"), 1)
    assert (linear.format, linear.n, linear.k) == ("fp8", 64, 32)
    assert linear.tactics[1] == TunedTactic(512, "tile.0", 2e-5)

    engine = open_engine(tmp_path / "engine")  # all digests are right, the new file's too
    assert TACTICS_FILE in engine.manifest.files
    assert json.loads(_tactics(engine.rank_file())) == {"version": 1, "linears": RECORDS}


def test_tuning_again_replaces_the_choices(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    write_engine(tmp_path / "engine", target="cuda")
    for _ in range(2):
        tune(tmp_path / "engine")
    open_engine(tmp_path / "engine")
    assert len(measured) == 2


def test_an_engine_that_was_never_tuned_has_no_choices(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", target="cuda")
    assert _tactics(tmp_path / "engine" / "rank0.engine") == ""


def test_other_targets_are_refused(tmp_path: Path, measured: list[tuple[Any, ...]]) -> None:
    write_engine(tmp_path / "engine", target="cpu")
    with pytest.raises(EngineIncompatible, match="only engines of target cuda"):
        tune(tmp_path / "engine")
    assert not measured


def test_a_build_without_cuda_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_engine(tmp_path / "engine", target="cuda")
    monkeypatch.setattr(_runtime, "has_cuda", lambda: False)
    with pytest.raises(EngineIncompatible, match="has no CUDA"):
        tune(tmp_path / "engine")
