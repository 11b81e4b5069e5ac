"""Atheris harness of the adapter reader: any folder gives updates, CheckpointError or UnsupportedModel.

    python tests/fuzz/fuzz_lora.py -max_total_time=60 [corpus_dir]

An input is `adapter_config.json`, a NUL byte, and `adapter_model.safetensors`; the rest as in `fuzz_safetensors.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness import fuzz, lora
from safetensors.numpy import save

from aotllm.errors import CheckpointError, UnsupportedModel

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}


def seeds() -> Iterator[bytes]:
    """Plain adapters in f32 and f16, patterns of ranks and scales, layers by number, and an empty file."""
    for dtype in (np.float32, np.float16):
        weights = save(
            {
                f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight": np.ones(shape, dtype)
                for layer, module in ((0, "self_attn.q_proj"), (1, "mlp.down_proj"))
                for factor, shape in (("A", (2, 4)), ("B", (3, 2)))
            }
        )
        for fields in (
            {},
            {"r": 8, "rank_pattern": {"^model.layers.0.self_attn.q_proj": 2, "down_proj": 2}, "use_rslora": True},
            {"alpha_pattern": {r"layers\.(0|1)\..*": 8}, "layers_to_transform": [0, 1], "target_modules": "all-linear"},
        ):
            yield json.dumps({**CONFIG, **fields}).encode() + b"\0" + weights
    yield json.dumps(CONFIG).encode() + b"\0" + save({})


def test_one(folder: Path, data: bytes) -> None:
    """Reads the input as a folder of two files."""
    config, _, weights = data.partition(b"\0")
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    with contextlib.suppress(CheckpointError, UnsupportedModel):
        for update in lora.read_lora(folder):
            assert update.module in lora.MODULES
            assert update.a.shape[0] == update.b.shape[1] <= lora.MAX_RANK
            assert np.isfinite(update.a).all()
            assert np.isfinite(update.b).all()


if __name__ == "__main__":
    fuzz(seeds(), test_one)
