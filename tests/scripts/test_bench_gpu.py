"""`scripts/bench_gpu.py` on target cpu: everything but the GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import bench_gpu
from bench_gpu import ROWS, VLLM, Row

SMALL = [
    *("--target", "cpu", "--layers", "1", "--hidden", "64", "--intermediate", "64", "--heads", "2", "--kv-heads", "2"),
    *("--head-dim", "32", "--vocab", "512", "--max-num-tokens", "64"),
]


def test_rows_say_what_they_are():
    assert Row.parse("64x1024/256") == Row(64, 1024, 256) == Row.parse("64×1024/256")
    assert str(Row(64, 1024, 256)) == "64×1024/256"
    for text in ("", "64", "64x1024", "64x/1", "0x1/1", "1x1/1/1"):
        with pytest.raises(Exception, match="got"):
            Row.parse(text)


def test_each_row_has_a_figure_to_compare_with():
    assert {dtype: list(rows) for dtype, rows in VLLM.items()} == {"bf16": ROWS, "fp8": ROWS}


@pytest.mark.parametrize("tp", [1, 2])
def test_every_request_is_answered_in_full(
    tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["--rows", "1x16/8", "3x5/2", "1x128/256"]
    output = tmp_path / "figures.json"
    arguments = [*SMALL, *rows, "--tp", str(tp), "--work", str(tmp_path / "work"), "--json", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *arguments])
    bench_gpu.main()
    (report,) = json.loads(output.read_text())["reports"]
    assert [result["row"] for result in report["results"]] == ["1×16/8", "3×5/2", "1×128/256"]
    for result, (requests, steps) in zip(report["results"], [(1, 8), (3, 2), (1, 257)], strict=True):
        assert result["steps"] >= steps - 1
        assert result["tokens_per_second"] > 0
        assert result["seconds"] >= result["first_token_seconds"] > 0, requests
    vllm = [result["vllm_seconds"] for result in report["results"]]
    assert vllm == [None, None, VLLM["bf16"][Row(1, 128, 256)] if tp == 1 else None]
    assert "do not compare" in capsys.readouterr().out
    assert not list((tmp_path / "work").iterdir())
