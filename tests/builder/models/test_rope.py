"""Rotary frequencies against transformers' own initialisers, for every variant."""

from __future__ import annotations

import numpy as np
import pytest

from aotllm.builder.config import RopeConfig
from aotllm.builder.models.rope import rotary_frequencies
from aotllm.errors import UnsupportedModel

HEAD_DIM = 64
MAX_POSITION = 4096
FACTORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
}

CASES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn untruncated, mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    "yarn with attention_factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.9,
    },
    "longrope": {"original_max_position_embeddings": 1024, **FACTORS},
    "longrope with factor": {"factor": 3.0, "original_max_position_embeddings": 1024, **FACTORS},
}


def transformers_frequencies(rope_type: str, parameters: dict, seq_len: int) -> tuple[np.ndarray, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10000.0, **parameters},
    )
    if rope_type == "default":
        inv_freq, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, device=None, seq_len=seq_len)
    return inv_freq.numpy(), factor


@pytest.mark.parametrize("max_seq_len", [256, MAX_POSITION, 3 * MAX_POSITION])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case: str, max_seq_len: int) -> None:
    rope_type, parameters = case.split()[0], CASES[case]
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items()}
    got, got_factor = rotary_frequencies(RopeConfig(rope_type=rope_type, **fields), HEAD_DIM, max_seq_len, MAX_POSITION)
    expected, expected_factor = transformers_frequencies(rope_type, parameters, max_seq_len)
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    assert got_factor == pytest.approx(expected_factor, rel=1e-12)


def test_gguf_frequency_factors_divide() -> None:
    factors = tuple(1.0 + i for i in range(HEAD_DIM // 2))
    plain, _ = rotary_frequencies(RopeConfig(), HEAD_DIM, 128, 128)
    scaled, _ = rotary_frequencies(RopeConfig(freq_factors=factors), HEAD_DIM, 128, 128)
    np.testing.assert_allclose(scaled, plain / np.array(factors), rtol=1e-6)


def test_partial_rotary() -> None:
    inv_freq, _ = rotary_frequencies(RopeConfig(rotary_dim=16), HEAD_DIM, 128, 128)
    np.testing.assert_allclose(inv_freq, 10000.0 ** -(np.arange(8) / 8), rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        (RopeConfig(rope_type="su"), "known ones"),
        (RopeConfig(rope_type="llama3"), "original_max_position_embeddings"),
        (RopeConfig(rope_type="longrope", original_max_position_embeddings=64), "factor"),
        (RopeConfig(freq_factors=(1.0, 2.0)), "expected 32"),
    ],
)
def test_refusals_say_what_is_wrong(rope: RopeConfig, word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        rotary_frequencies(rope, HEAD_DIM, 128, 128)
