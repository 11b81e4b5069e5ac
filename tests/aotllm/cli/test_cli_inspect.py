"""`aotllm inspect` and `aotllm verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotllm.cli.inspect import op_table
from aotllm.engines import Engine, Manifest
from tests.aotllm.cli.command_line import CommandLine
from tests.engines.samples import write_engine


class PlannedEngine(Engine):
    """A sample manifest with a plan of two equal layers and their tensors."""

    def plan(self, rank: int = 0) -> dict[str, Any]:
        def linear(n: int, k: int, *tensors: tuple[str, str]) -> dict[str, Any]:
            return {"n": n, "k": k, "segments": [{"tensor": t, "format": f, "n": n} for t, f in tensors]}

        layers = [
            {"op": "norm_qkv_rope", "layer": i, "out": 1, "norm": f"{i}.norm", "linear": f"{i}.qkv", "bias": None}
            for i in range(2)
        ]
        return {
            "buffers": [{"name": "hidden", "width": 8}, {"name": "query", "width": 4}],
            "linears": {
                "embedding": linear(32, 8, ("e", "q8_0")),
                "0.qkv": linear(6, 8, ("0.q", "q4_k"), ("0.v", "q6_k")),
                "1.qkv": linear(6, 8, ("1.q", "q4_k"), ("1.v", "q6_k")),
            },
            "ops": [
                {"op": "embedding", "out": 0, "linear": "embedding"},
                *layers,
                {"op": "lm_head", "norm": "norm", "linear": "embedding"},
            ],
        }

    def tensors(self, rank: int = 0) -> dict[str, tuple[str, tuple[int, ...], int]]:
        sizes = {"e": 320, "0.q": 64, "0.v": 32, "1.q": 64, "1.v": 32, "0.norm": 8, "1.norm": 8, "norm": 8}
        return {name: ("U8", (count,), count) for name, count in sizes.items()}


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    manifest = write_engine(tmp_path / "engine")
    engine = PlannedEngine(tmp_path / "engine", manifest)
    monkeypatch.setattr("aotllm.engines.open_engine", lambda path, **_: engine)
    return manifest


def test_json_has_manifest_ops_and_memory(aotllm: CommandLine, manifest: Manifest):
    outcome = aotllm("inspect", "engine", "--json")
    assert outcome.code == 0
    assert outcome.json["manifest"] == manifest.model_dump(mode="json")
    assert outcome.json["ops"][1] == {
        "op": "norm_qkv_rope",
        "layer": 0,
        "out": "query",
        "width": 4,
        "matrices": [[6, 8]],
        "formats": ["q4_k", "q6_k"],
        "weight_bytes": 64 + 32 + 8,
    }
    assert [op["weight_bytes"] for op in outcome.json["ops"]] == [320, 104, 104, 328]
    assert outcome.json["memory"] == {
        "weights": 128,
        "arena": 1024,
        "kv_per_token": 512,
        "kv_per_block": 512 * 16,
        "kv_at_max_seq_len": 512 * 64,
    }


def rows(text: str, op: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if f" {op} " in line]


def test_tables_merge_equal_layers_unless_told_otherwise(
    aotllm: CommandLine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "160")
    merged = ["norm_qkv_rope", "0-1", "query [tokens, 4]", "[6, 8]", "q4_k q6_k", "104 B", "2", "208 B"]
    assert rows(aotllm("inspect", "engine").out, "norm_qkv_rope") == [merged]
    assert [row[1] for row in rows(aotllm("inspect", "engine", "--all").out, "norm_qkv_rope")] == ["0", "1"]


def test_verify(aotllm: CommandLine, tmp_path: Path):
    write_engine(tmp_path / "engine")
    outcome = aotllm("verify", tmp_path / "engine", "--json")
    assert (outcome.code, outcome.json["ok"]) == (0, True)
    damaged = tmp_path / "engine" / "tokenizer.json"
    damaged.write_text("[]")
    outcome = aotllm("verify", tmp_path / "engine")
    assert (outcome.code, outcome.out) == (3, "")
    assert "tokenizer.json" in outcome.err


class EngineWithExperts(PlannedEngine):
    """One op of two experts."""

    def plan(self, rank: int = 0) -> dict[str, Any]:
        segments = {part: [{"tensor": f"{part}.{i}", "format": "q4_k", "n": 6} for i in range(2)] for part in PARTS}
        moe = {"op": "norm_moe", "in": 0, "residual": 0, "out": 0, "norm": "norm", "router": "router"}
        return {
            "buffers": [{"name": "hidden", "width": 8}],
            "linears": {part: {"n": 12, "k": 8, "segments": segments[part]} for part in PARTS},
            "ops": [{**moe, **{part: part for part in PARTS}}],
        }

    def tensors(self, rank: int = 0) -> dict[str, tuple[str, tuple[int, ...], int]]:
        sizes = {"norm": 8, "router": 16, **{f"{part}.{i}": 100 for part in PARTS for i in range(2)}}
        return {name: ("U8", (count,), count) for name, count in sizes.items()}


PARTS = ("gate", "up", "down")


def test_weights_of_experts_are_all_counted(manifest: Manifest, tmp_path: Path):
    (op,) = op_table(EngineWithExperts(tmp_path / "engine", manifest))
    assert op["matrices"] == [[12, 8]] * 3
    assert op["weight_bytes"] == 600 + 8 + 16
