"""Engines with quantized and bf16 matrices side by side (`--quantize-exclude`) compute what their plans say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.engines import Sequences, exact_logits, random_prompt, relative_error, tiny_engine


@pytest.mark.parametrize(("quantize", "tolerance"), [("fp8", 8e-2), ("int4", 3e-2)])
@pytest.mark.parametrize("excluded", ["0,-1", "down", "gate_up", "qkv,o"])
def test_matrices_of_two_formats(excluded: str, quantize: str, tolerance: float, tmp_path: Path) -> None:
    """In FP8 a rounding between ops may be another code of E4M3."""
    _, engine = tiny_engine(tmp_path, "llama", quantize=quantize, quantize_exclude=excluded)
    prompt = random_prompt(31, 150)
    expected = exact_logits(engine, prompt)
    sequences = Sequences(engine)
    for chunk in (1, 9, 64, 150):
        error = relative_error(sequences.logits(prompt, chunk), expected)
        print(f"{quantize} without {excluded}, chunks of {chunk}: relative error {error:.4f}")
        assert error <= tolerance, chunk
