"""Plans with matrices of integers as the runtime reads them: what contradicts itself is named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotllm import _runtime
from aotllm.errors import EngineError, EngineIncompatible
from tests.integration.engines import build_engine, save_tiny_model
from tests.integration.test_cuda_refusals import LLAMA

NAME = "layers.0.o"


def load(rank_file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Loads the engine's file with another record of one linear; nothing here can run it."""
    data = rank_file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    plan = json.loads(header["__metadata__"]["plan"])
    edit(plan["linears"][NAME])
    header["__metadata__"]["plan"] = json.dumps(plan)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    changed = rank_file.with_name("changed.engine")
    changed.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    _runtime.GptManager(str(changed), _runtime.ManagerConfig())


@pytest.fixture(scope="module", params=["int8", "int4"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("engines")
    save_tiny_model(folder / "model", "LlamaForCausalLM", LLAMA, dtype="bf16")
    built = build_engine(folder / "model", folder / "engine", target="cuda", quantize=request.param)
    return request.param, built.rank_file()


@pytest.mark.skipif(_runtime.has_cuda(), reason="this build has CUDA")
def test_a_sound_plan_is_read(engine: tuple[str, Path]) -> None:
    with pytest.raises(EngineIncompatible, match="has no CUDA"):
        load(engine[1], lambda record: None)


@pytest.mark.parametrize(
    ("fmt", "changes", "message"),
    [
        ("int4", {"group": 64}, r'linears\["layers.0.o"\].group: .*32 or 128'),
        ("int4", {"group": 32}, r"scales: .*an F32 tensor of 256 values"),
        ("int4", {"group": None}, "group"),
        ("int4", {"zeros": None}, "zeros"),
        ("int4", {"zeros": "layers.0.o"}, r"zeros: .*a U8 tensor of 64 bytes"),
        ("int4", {"n": 128}, r"tensor: .*a U8 tensor of 8192 bytes"),
        ("int4", {"format": "int8", "group": None, "zeros": None}, r"tensor: .*a U8 tensor of 8192 bytes"),
        ("int8", {"group": 128}, r"group: .*32"),
        ("int8", {"group": 32}, r"scales: .*an F32 tensor of 256 values"),
        ("int8", {"zeros": "layers.0.o"}, r"zeros: .*no zeros without a group"),
        ("int8", {"scales": "layers.0.qkv.scales"}, r"scales: .*an F32 tensor of 64 values"),
    ],
)
def test_records_that_contradict_themselves(
    engine: tuple[str, Path], fmt: str, changes: dict[str, Any], message: str
) -> None:
    built, rank_file = engine
    if built != fmt:
        pytest.skip("a record of the other format")

    def edit(record: dict[str, Any]) -> None:
        for name, value in changes.items():
            if value is None:
                record.pop(name, None)
            else:
                record[name] = value

    with pytest.raises(EngineError, match=message):
        load(rank_file, edit)
