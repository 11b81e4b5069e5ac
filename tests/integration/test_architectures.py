"""Every architecture and RoPE variant against transformers: a tiny random model, the whole path, the same logits.

The model is made by `transformers` and saved as safetensors; the engine is built from that folder with the public
builder and run by the C++ runtime. float32: logits within 1e-3 and the same 16 greedy tokens; bfloat16 and float16
weights: the same arg-max wherever the reference is not near a tie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.engines import GreedyReference, build_engine, greedy, prompt_logits, save_tiny_model

HIDDEN, HEADS, HEAD_DIM, VOCAB = 64, 4, 16, 128
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
GEMMA = {
    **BASE,
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", BASE),
    "llama, tied": ("LlamaForCausalLM", {**BASE, "tie_word_embeddings": True}),
    "llama, biases": ("LlamaForCausalLM", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "llama, odd sizes": (
        "LlamaForCausalLM",
        {**BASE, "hidden_size": 72, "intermediate_size": 100, "head_dim": 24, "num_attention_heads": 3,
         "num_key_value_heads": 1, "vocab_size": 131},
    ),
    "mistral": ("MistralForCausalLM", {**BASE, "sliding_window": None}),
    "mistral, window": ("MistralForCausalLM", {**BASE, "sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", BASE),
    "qwen3": ("Qwen3ForCausalLM", BASE),
    "mixtral": ("MixtralForCausalLM", {**BASE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**BASE, **EXPERTS}),
    "qwen3_moe, normalized, dense layers": (
        "Qwen3MoeForCausalLM",
        {**BASE, **EXPERTS, "num_hidden_layers": 4, "norm_topk_prob": True, "decoder_sparse_step": 2,
         "mlp_only_layers": [1]},
    ),
    "qwen3_moe, odd sizes": (
        "Qwen3MoeForCausalLM",
        {**BASE, "hidden_size": 72, "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
}  # fmt: skip
ROPES = {
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=2.0),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "longrope, short": rope("longrope", factor=4.0, original_max_position_embeddings=200, **FACTORS),
}
CASES = {
    **ARCHITECTURES,
    **{f"llama, {name}": ("LlamaForCausalLM", {**BASE, **parameters}) for name, parameters in ROPES.items()},
}
PROMPT_TOKENS = 40


def random_prompt(seed: int, length: int = PROMPT_TOKENS, vocab: int = VOCAB) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_transformers(case: str, tmp_path: Path) -> None:
    model_class, parameters = CASES[case]
    model = save_tiny_model(tmp_path / "model", model_class, parameters)
    engine = build_engine(tmp_path / "model", tmp_path / "engine", max_seq_len=128)
    prompt = random_prompt(7)
    reference = GreedyReference(model, prompt, new_tokens=16)

    logits = prompt_logits(engine, prompt)
    assert np.abs(logits - reference.prompt_logits).max() <= 1e-3
    assert greedy(engine, prompt, 16) == reference.tokens


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_beyond_the_original_length(rope_type: str, tmp_path: Path) -> None:
    """An engine for long sequences has the frequencies that transformers uses for a prompt of just that length."""
    parameters: dict[str, Any] = {"factor": 2.0}
    if rope_type == "longrope":
        parameters |= {"original_max_position_embeddings": 32, **FACTORS}
    config = {**BASE, "max_position_embeddings": 32 if rope_type == "dynamic" else 256, **rope(rope_type, **parameters)}
    model = save_tiny_model(tmp_path / "model", "LlamaForCausalLM", config)
    engine = build_engine(tmp_path / "model", tmp_path / "engine", max_seq_len=100)
    prompt = random_prompt(3, length=100)
    reference = GreedyReference(model, prompt, new_tokens=0)
    assert np.abs(prompt_logits(engine, prompt) - reference.prompt_logits).max() <= 1e-3


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma2", "gemma3"])
def test_half_precision_weights(case: str, dtype: str, tmp_path: Path) -> None:
    """The reference computes in float32 with the rounded weights, so only the order of sums and the KV type differ."""
    model_class, parameters = CASES[case]
    model = save_tiny_model(tmp_path / "model", model_class, parameters, dtype=dtype)
    engine = build_engine(tmp_path / "model", tmp_path / "engine", max_seq_len=128)
    prompt = random_prompt(11)
    reference = GreedyReference(model, prompt, new_tokens=0)
    logits = prompt_logits(engine, prompt)
    clear = reference.top2_gap > 0.05
    assert clear.sum() > PROMPT_TOKENS // 4  # the case says something
    assert (logits.argmax(-1) == reference.prompt_logits.argmax(-1))[clear].all()


def test_window_edges(tmp_path: Path) -> None:
    """Prompts just shorter than, as long as, and longer than a sliding window."""
    model = save_tiny_model(tmp_path / "model", *CASES["mistral, window"])
    engine = build_engine(tmp_path / "model", tmp_path / "engine", max_seq_len=128)
    for length in (7, 8, 9, 16, 17):
        prompt = random_prompt(length, length)
        reference = GreedyReference(model, prompt, new_tokens=16)
        assert greedy(engine, prompt, 16) == reference.tokens
