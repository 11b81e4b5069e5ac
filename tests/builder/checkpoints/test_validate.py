"""`validate` and `expected_tensors`: what both readers rely on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from aotllm.builder.checkpoints.base import TensorInfo
from aotllm.builder.checkpoints.expected import ARCHITECTURES, expected_tensors, select_tensors
from aotllm.builder.checkpoints.validate import validate
from aotllm.builder.config import ModelConfig, RopeConfig
from aotllm.errors import CheckpointError

SOUND = ModelConfig(
    architecture="llama",
    vocab_size=10,
    hidden_size=6,
    intermediate_size=7,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5}

UNSOUND: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{name} of 0": ({name: 0}, f"{name} is 0; expected an integer above zero")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        )
    },
    "architecture": ({"architecture": "mamba"}, "architecture 'mamba' is not known"),
    "heads": ({"num_kv_heads": 3}, "4 attention heads are no multiple of 3 key/value heads"),
    "more kv heads": ({"num_kv_heads": 8}, "4 attention heads are no multiple of 8"),
    "odd head": ({"head_dim": 7}, "head_dim is 7; RoPE needs an even number"),
    "layers": ({"num_layers": 10_001}, "num_layers is 10001; at most 10000"),
    "eps": ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    "query scale": ({"query_scale": math.inf}, "query_scale is inf"),
    "softcap": ({"attn_logit_softcap": -1.0}, "attn_logit_softcap is -1.0; expected 0 (off)"),
    "windows": ({"layer_windows": (4,)}, "1 sliding windows for 2 layers"),
    "negative window": ({"layer_windows": (4, -4)}, "a sliding window is negative"),
    "experts": ({"num_experts": 1025}, "1025 experts; expected 0 (none) to 1024"),
    "fewer experts than none": ({"num_experts": -1}, "-1 experts; expected 0"),
    "experts of all layers": (
        {**EXPERTS, "num_experts": 1024, "num_layers": 1000},
        "1024 experts in 1000 layers; at most 131072 in all",
    ),
    "no expert taken": ({**EXPERTS, "num_experts_per_tok": 0}, "a token takes 0 of 4 experts; expected 1 to 4"),
    "too many taken": ({**EXPERTS, "num_experts_per_tok": 5}, "a token takes 5 of 4 experts; expected 1 to 4"),
    "experts of nothing": ({**EXPERTS, "moe_intermediate_size": 0}, "experts of 0 neurons"),
    "rope type": ({"rope": RopeConfig("ntk")}, "RoPE: type 'ntk' is not known; known are default, linear"),
    "rope theta": ({"rope": RopeConfig(theta=1.0)}, "RoPE: theta is 1.0"),
    "rope factor": ({"rope": RopeConfig("linear", factor=0.0)}, "RoPE: scaling factor is 0.0"),
    "local rope": ({"rope_local": RopeConfig(theta=-1.0)}, "RoPE: theta is -1.0"),
    "rotary dim": ({"rope": RopeConfig(rotary_dim=10)}, "RoPE: 10 rotated dimensions; expected an even number up to"),
    "odd rotary dim": ({"rope": RopeConfig(rotary_dim=3)}, "RoPE: 3 rotated dimensions"),
    "dynamic": ({"rope": RopeConfig("dynamic", rotary_dim=2)}, "RoPE: dynamic scaling needs more than 2"),
    "divisors": ({"rope": RopeConfig(freq_factors=(1.0,))}, "RoPE: freq_factors has 1 values; expected 4"),
    "divisor of 0": (
        {"rope": RopeConfig(freq_factors=(1.0, 0.0, 1.0, 1.0))},
        "RoPE: freq_factors holds a value",
    ),
    "longrope": (
        {"rope": RopeConfig("longrope", original_max_position_embeddings=9)},
        "RoPE: longrope needs short",
    ),
    "yarn": ({"rope": RopeConfig("yarn")}, "RoPE: yarn needs original_max_position_embeddings above 1, got None"),
    "llama3": (
        {"rope": RopeConfig("llama3", original_max_position_embeddings=9, low_freq_factor=4.0, high_freq_factor=1.0)},
        "RoPE: llama3 needs 0 < low_freq_factor < high_freq_factor, got 4.0 and 1.0",
    ),
}


def test_sound_config_is_returned() -> None:
    assert validate(SOUND, "here") == SOUND


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_configs(case: str) -> None:
    fields, message = UNSOUND[case]
    with pytest.raises(CheckpointError) as caught:
        validate(replace(SOUND, **fields), "here")
    assert str(caught.value).startswith(f"here: {message}")


def test_ids_outside_the_vocabulary_are_dropped() -> None:
    with pytest.warns(UserWarning, match=r"here: token ids \[10, 12\] are outside the vocabulary of 10 tokens"):
        config = validate(replace(SOUND, bos_token_id=10, eos_token_ids=(3, 12, 3, 9)), "here")
    assert (config.bos_token_id, config.eos_token_ids) == (None, (3, 9))


def test_expected_tensors_of_llama() -> None:
    assert expected_tensors(replace(SOUND, num_layers=1, qkv_bias=True, tie_word_embeddings=False)) == {
        "model.embed_tokens.weight": (10, 6),
        "model.layers.0.self_attn.q_proj.weight": (32, 6),
        "model.layers.0.self_attn.q_proj.bias": (32,),
        "model.layers.0.self_attn.k_proj.weight": (16, 6),
        "model.layers.0.self_attn.k_proj.bias": (16,),
        "model.layers.0.self_attn.v_proj.weight": (16, 6),
        "model.layers.0.self_attn.v_proj.bias": (16,),
        "model.layers.0.self_attn.o_proj.weight": (6, 32),
        "model.layers.0.mlp.gate_proj.weight": (7, 6),
        "model.layers.0.mlp.up_proj.weight": (7, 6),
        "model.layers.0.mlp.down_proj.weight": (6, 7),
        "model.layers.0.input_layernorm.weight": (6,),
        "model.layers.0.post_attention_layernorm.weight": (6,),
        "model.norm.weight": (6,),
        "lm_head.weight": (10, 6),
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_keep_file_order_and_extras_warn_once(architecture: str) -> None:
    config = replace(SOUND, architecture=architecture)
    shapes = dict(reversed(expected_tensors(config).items()))
    found = {name: TensorInfo(name, shape, "f32", 4) for name, shape in {**shapes, "x.0": (1,), "x.1": (1,)}.items()}
    with pytest.warns(UserWarning, match="2 tensors that .* does not use are ignored: 'x.0', 'x.1'") as warned:
        assert list(select_tensors(found, config, "here")) == list(shapes)
    assert len(warned) == 1
