"""Every definition computes what transformers computes from the same weights, beyond the sliding window too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from aotllm.builder.config import ModelConfig, RopeConfig
from aotllm.builder.models import trace
from tests.builder.fakes import TINY, MemoryCheckpoint, random_tokens, run_graph

WINDOW = 5
TOKENS = 19  # several windows
SIZES = {
    "vocab_size": TINY.vocab_size,
    "hidden_size": TINY.hidden_size,
    "intermediate_size": TINY.intermediate_size,
    "num_hidden_layers": TINY.num_layers,
    "num_attention_heads": TINY.num_heads,
    "num_key_value_heads": TINY.num_kv_heads,
    "head_dim": TINY.head_dim,
    "max_position_embeddings": TINY.max_position_embeddings,
    "rms_norm_eps": TINY.rms_norm_eps,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA_SIZES = {**SIZES, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA = replace(
    TINY,
    rms_norm_weight_offset=1.0,
    hidden_act="gelu_tanh",
    tie_word_embeddings=True,
    query_scale=24**-0.5,
    embedding_scale=TINY.hidden_size**0.5,
)
SLIDING, FULL = "sliding_attention", "full_attention"

CASES: dict[str, tuple[transformers.PretrainedConfig, ModelConfig]] = {
    "llama": (transformers.LlamaConfig(**SIZES, tie_word_embeddings=False), TINY),
    "llama, biases everywhere, tied": (
        transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        replace(TINY, qkv_bias=True, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "llama, rope llama3": (
        transformers.LlamaConfig(
            **SIZES,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        replace(
            TINY,
            rope=RopeConfig(
                rope_type="llama3",
                theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
    ),
    "llama, rope yarn": (
        transformers.LlamaConfig(
            **SIZES,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        replace(TINY, rope=RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    ),
    "mistral": (
        transformers.MistralConfig(**SIZES, sliding_window=WINDOW, tie_word_embeddings=False),
        replace(TINY, architecture="mistral", layer_windows=(WINDOW,) * 3),
    ),
    "mistral without a window": (
        transformers.MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False),
        replace(TINY, architecture="mistral"),
    ),
    "qwen2": (
        transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
        replace(TINY, architecture="qwen2", qkv_bias=True, tie_word_embeddings=True),
    ),
    "qwen2, windows from layer 1 on": (
        transformers.Qwen2Config(
            **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, tie_word_embeddings=False
        ),
        replace(TINY, architecture="qwen2", qkv_bias=True, layer_windows=(0, WINDOW, WINDOW)),
    ),
    "qwen3": (
        transformers.Qwen3Config(**SIZES, tie_word_embeddings=False),
        replace(TINY, architecture="qwen3"),
    ),
    "mixtral": (
        transformers.MixtralConfig(
            **SIZES, sliding_window=WINDOW, num_local_experts=5, num_experts_per_tok=2, tie_word_embeddings=False
        ),
        replace(
            TINY,
            architecture="mixtral",
            rope=RopeConfig(theta=1e6),
            layer_windows=(WINDOW,) * 3,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=TINY.intermediate_size,
            norm_topk_prob=True,
        ),
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig(
            **SIZES,
            num_experts=7,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            mlp_only_layers=[1],
            tie_word_embeddings=False,
        ),
        replace(
            TINY,
            architecture="qwen3_moe",
            num_experts=7,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            dense_layers=(1,),
        ),
    ),
    "qwen3_moe, normalized": (
        transformers.Qwen3MoeConfig(
            **SIZES,
            num_experts=4,
            num_experts_per_tok=4,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        replace(
            TINY,
            architecture="qwen3_moe",
            num_experts=4,
            num_experts_per_tok=4,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            qkv_bias=True,
            attention_out_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "gemma2": (
        transformers.Gemma2Config(
            **GEMMA_SIZES,
            layer_types=[SLIDING, FULL, SLIDING],
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        replace(
            GEMMA,
            architecture="gemma2",
            layer_windows=(WINDOW, 0, WINDOW),
            attn_logit_softcap=2.0,
            final_logit_softcap=3.0,
        ),
    ),
    "gemma3": (
        transformers.Gemma3TextConfig(
            **GEMMA_SIZES,
            layer_types=[SLIDING, SLIDING, FULL],
            rope_parameters={
                FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        replace(
            GEMMA,
            architecture="gemma3",
            layer_windows=(WINDOW, WINDOW, 0),
            rope=RopeConfig(rope_type="linear", theta=1000000.0, factor=8.0),
            rope_local=RopeConfig(),
        ),
    ),
}


def reference_model(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """A random model whose every parameter matters: norms and biases are not the identity."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def checkpoint_of(model: transformers.PreTrainedModel, config: ModelConfig) -> MemoryCheckpoint:
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del arrays["lm_head.weight"]
    return MemoryCheckpoint(config, dict(by_expert(arrays)))


def by_expert(arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """What transformers holds in one tensor for all experts, under the name of each matrix."""
    for name, array in arrays.items():
        stem, _, part = name.rpartition(".")
        if array.ndim < 3:
            yield name, array
            continue
        for expert, matrix in enumerate(array):
            halves = np.split(matrix, 2) if part == "gate_up_proj" else [matrix]
            parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
            yield from ((f"{stem}.{expert}.{p}.weight", half) for p, half in zip(parts, halves, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name):
    reference_config, config = CASES[name]
    model = reference_model(reference_config)
    tokens = random_tokens(config, TOKENS)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    assert expected.std() > 0.5  # a tolerance that means something
    actual = run_graph(trace(checkpoint_of(model, config), config.max_position_embeddings), tokens)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_the_window_is_counted_as_transformers_counts_it(name):
    """One token more or less in the window changes the logits by far more than the tolerance above."""
    reference_config, config = CASES[name]
    model = reference_model(reference_config)
    checkpoint = checkpoint_of(model, config)
    tokens = random_tokens(config, TOKENS)
    right = run_graph(trace(checkpoint, 64), tokens)
    for window in (WINDOW - 1, WINDOW + 1):
        checkpoint.config = replace(config, layer_windows=tuple(window if w else 0 for w in config.layer_windows))
        wrong = run_graph(trace(checkpoint, 64), tokens)
        assert np.abs(wrong - right).max() > 1e-2
        np.testing.assert_allclose(wrong[: min(window, WINDOW)], right[: min(window, WINDOW)], atol=5e-5)


def test_positions_are_inputs():
    """RoPE is relative: shifting all positions changes nothing but rounding."""
    checkpoint = checkpoint_of(reference_model(CASES["qwen3"][0]), CASES["qwen3"][1])
    graph = trace(checkpoint, 64)
    tokens = random_tokens(TINY, TOKENS)
    np.testing.assert_allclose(run_graph(graph, tokens, start=40), run_graph(graph, tokens), atol=1e-4)
