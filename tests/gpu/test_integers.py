"""Logits of INT4 and INT8 engines against their own weights in float32, in chunks that every kind of kernel takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aotllm.engines import Engine
from tests.builder.checkpoints.int_models import KINDS, quantize_folder
from tests.gpu.engines import (
    CASES,
    MIXTURES,
    Sequences,
    exact_logits,
    random_prompt,
    relative_error,
    row_errors,
    tiny_engine,
)
from tests.integration.engines import build_engine, save_tiny_model

TOLERANCE = 3e-2
"""Numbers between ops are bf16, and so are weights where more than 64 rows are multiplied"""
PROMPT_TOKENS = 150
CHUNKS = (1, 9, 17, 40, 64, 128)


def check(engine: Engine, seed: int, *, has_experts: bool = False) -> None:
    """Of mixtures half of the rows: where two experts that a row wants about equally change places, that row and those
    that attend to it go other ways (in bf16, too: 8 % over all rows, 1 % of half of them)."""
    prompt = random_prompt(seed, PROMPT_TOKENS)
    expected = exact_logits(engine, prompt)
    sequences = Sequences(engine, count=2)
    for chunk in CHUNKS:
        got = sequences.logits(prompt, chunk)
        error = np.median(row_errors(got, expected)) if has_experts else relative_error(got, expected)
        print(f"chunks of {chunk}: relative error {error:.4f}")
        assert error <= TOLERANCE, chunk


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("case", ["llama", "llama, heads of 96, odd sizes", "qwen2", "gemma2", *MIXTURES])
def test_quantized_models(quantize: str, case: str, tmp_path: Path) -> None:
    _, engine = tiny_engine(tmp_path, case, quantize=quantize)
    assert quantize in engine.manifest.precision.weight_formats
    check(engine, 21, has_experts=case in MIXTURES)


def test_a_quantized_head(tmp_path: Path) -> None:
    _, engine = tiny_engine(tmp_path, "llama", quantize="int4", quantize_lm_head=True)
    check(engine, 22)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_integers(kind: str, tmp_path: Path) -> None:
    model_class, parameters = CASES["llama"]
    save_tiny_model(tmp_path / "model", model_class, parameters, dtype="bf16", max_gain=0.8)
    quantize_folder(tmp_path / "model", KINDS[kind])
    engine = build_engine(tmp_path / "model", tmp_path / "engine", target="cuda", max_seq_len=512, max_num_tokens=256)
    check(engine, 23)


@pytest.mark.parametrize("kind", ["awq", "gptq, groups of 32, v2", "gptq, 8 bits"])
def test_experts_of_integers(kind: str, tmp_path: Path) -> None:
    model_class, parameters = CASES["mixtral"]
    sizes = {**parameters, "hidden_size": 256, "intermediate_size": 384}
    save_tiny_model(tmp_path / "model", model_class, sizes, dtype="bf16", max_gain=0.8)
    quantize_folder(tmp_path / "model", KINDS[kind])
    engine = build_engine(tmp_path / "model", tmp_path / "engine", target="cuda", max_seq_len=512, max_num_tokens=256)
    check(engine, 25, has_experts=True)


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_deterministic_engines_do_not_depend_on_chunks(case: str, tmp_path: Path) -> None:
    _, engine = tiny_engine(tmp_path, case, quantize="int4")
    prompt = random_prompt(24, PROMPT_TOKENS)
    sequences = Sequences(engine, count=1, deterministic=True)
    whole = sequences.logits(prompt)
    for chunk in CHUNKS:
        np.testing.assert_array_equal(sequences.logits(prompt, chunk), whole)
