"""Atheris harness of the Hugging Face reader: any folder gives a model, CheckpointError or UnsupportedModel.

    python tests/fuzz/fuzz_safetensors.py -max_total_time=60 [corpus_dir]

An input is `config.json`, a NUL byte, and `model.safetensors`. Options are libFuzzer's. Seeds are made on the spot;
inputs that reach new code are added to `corpus_dir` where one is given. A failure is written to `crash-…` in the
working folder: pass that file instead of a folder to run it again. Not collected by pytest (the name does not start
with `test_`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import fuzz, read_everything
from safetensors.numpy import save

from aotllm.builder.checkpoints.expected import expected_tensors
from aotllm.builder.config import ModelConfig

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
}
MODEL = ModelConfig("llama", 4, 8, 12, 1, 2, 1, 4, 16, 1e-5, tie_word_embeddings=True)


def seeds() -> Iterator[bytes]:
    """A whole model in f32 and f16, with scaled RoPE, of another architecture, and with an empty file."""
    for dtype in (np.float32, np.float16):
        weights = save({name: np.ones(shape, dtype) for name, shape in expected_tensors(MODEL).items()})
        for fields in (
            {},
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
            {"architectures": None, "model_type": "gemma3", "text_config": {"hidden_size": 8, "head_dim": 4}},
        ):
            yield json.dumps({**CONFIG, **fields}).encode() + b"\0" + weights
    yield json.dumps(CONFIG).encode() + b"\0" + save({})


def test_one(folder: Path, data: bytes) -> None:
    """Reads the input as a folder of two files."""
    config, _, weights = data.partition(b"\0")
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)
    read_everything(folder)


if __name__ == "__main__":
    fuzz(seeds(), test_one)
