"""`config.json`: both spellings of RoPE, end-of-sequence ids, and everything refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.checkpoints.huggingface_config import read_config
from aotllm.builder.checkpoints.validate import validate
from aotllm.builder.config import RopeConfig
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.checkpoints.tiny_models import edit


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Any:
    """Reading a sound checkpoint says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, tuple[dict[str, Any], RopeConfig]] = {
    "nothing said": ({}, RopeConfig()),
    "theta": ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
    "null scaling": ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
    "new spelling": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(theta=5e5)),
    "oldest spelling": ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig("linear", factor=2.0)),
    "old linear": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, RopeConfig("linear", factor=2.0)),
    "dynamic": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        RopeConfig("dynamic", factor=2.0, original_max_position_embeddings=256),
    ),
    "old llama3": (
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
        RopeConfig("llama3", 5e5, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "new llama3": (
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 64}},
        RopeConfig("llama3", 5e5, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16}},
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0),
    ),
    "yarn derives its factor": (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32, "truncate": False}},
        RopeConfig("yarn", factor=8.0, original_max_position_embeddings=32, truncate=False),
    ),
    "longrope": (
        {
            "original_max_position_embeddings": 128,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2] * 16},
        },
        RopeConfig(
            "longrope",
            factor=2.0,
            original_max_position_embeddings=128,
            short_factor=(1.0,) * 16,
            long_factor=(2.0,) * 16,
        ),
    ),
    "per layer type, the same": (
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}},
        RopeConfig(theta=5e5),
    ),
    "partial": ({"partial_rotary_factor": 0.5}, RopeConfig(rotary_dim=16)),
}


@pytest.mark.parametrize("case", ROPES)
def test_rope_in_every_spelling(case: str, folder: Path) -> None:
    fields, expected = ROPES[case]
    edit(folder, drop=("rope_parameters",), **fields)
    config = open_checkpoint(folder).config
    assert config.rope == expected
    assert config.rope_local is None


GEMMA3_ROPES: dict[str, tuple[dict[str, Any], RopeConfig, RopeConfig]] = {
    "nothing said": ({}, RopeConfig(theta=1e6), RopeConfig(theta=1e4)),
    "old": (
        {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        RopeConfig("linear", theta=2e6, factor=8.0),
        RopeConfig(theta=3e4),
    ),
    "new": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            }
        },
        RopeConfig("linear", theta=2e6, factor=8.0),
        RopeConfig(theta=3e4),
    ),
}


@pytest.mark.parametrize("case", GEMMA3_ROPES)
def test_two_ropes_of_gemma3(case: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    fields, full, local = GEMMA3_ROPES[case]
    folder = Path(shutil.copytree(saved("gemma3"), tmp_path / "gemma3"))
    edit(folder, drop=("rope_parameters",), **fields)
    config = open_checkpoint(folder).config
    assert (config.rope, config.rope_local) == (full, local)
    assert config.layer_rope(0) == local
    assert config.layer_rope(5) == full


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (2, 2, (2,)),
        (2, [7, 2, 9], (2, 7, 9)),
        (None, 5, (5,)),
        (None, None, ()),
    ],
)
def test_end_of_sequence_ids_are_merged(
    in_config: Any, in_generation_config: Any, expected: tuple[int, ...], folder: Path
) -> None:
    edit(folder, eos_token_id=in_config)
    edit(folder, "generation_config.json", eos_token_id=in_generation_config)
    assert open_checkpoint(folder).config.eos_token_ids == expected


def test_generation_config_may_be_absent(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).config.eos_token_ids == (2,)


def test_token_ids_outside_the_vocabulary_are_dropped_with_a_warning(folder: Path) -> None:
    edit(folder, eos_token_id=[2, 96])
    with pytest.warns(UserWarning, match=r"\[96\] are outside the vocabulary of 96"):
        assert open_checkpoint(folder).config.eos_token_ids == (2,)


MIXTRAL = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
QWEN3_MOE = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "dense_layers": (),
}
EXPERTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "defaults of mixtral": ("mixtral", {}, MIXTRAL),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 50},
        {**MIXTRAL, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 50},
    ),
    "defaults of qwen3_moe": ("qwen3_moe", {}, QWEN3_MOE),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
        {
            **QWEN3_MOE,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "as transformers 5 spells it": ("qwen3_moe", {"num_local_experts": 16}, {**QWEN3_MOE, "num_experts": 16}),
    "no experts": ("qwen3_moe", {"num_experts": 0}, {**QWEN3_MOE, "num_experts": 0}),
    "some layers dense": ("qwen3_moe", {"mlp_only_layers": [2, 1]}, {**QWEN3_MOE, "dense_layers": (1, 2)}),
    "every other layer": ("qwen3_moe", {"decoder_sparse_step": 2}, {**QWEN3_MOE, "dense_layers": (0, 2)}),
    "both": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [1, 7]},
        {**QWEN3_MOE, "dense_layers": (0, 1, 2)},
    ),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts(case: str, folder: Path) -> None:
    model_type, fields, expected = EXPERTS[case]
    values = json.loads((folder / "config.json").read_text())
    values.update(model_type=model_type, architectures=None, **fields)
    config = validate(read_config(values, {}, "config.json"), "config.json")
    assert {name: getattr(config, name) for name in expected} == expected


BAD_CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "heads missing": ({"num_attention_heads": None}, CheckpointError, "'num_attention_heads' is missing; expected an"),
    "heads a string": ({"num_attention_heads": "4"}, CheckpointError, "'num_attention_heads' is '4'; expected an int"),
    "heads a boolean": ({"num_attention_heads": True}, CheckpointError, "'num_attention_heads' is True"),
    "heads zero": ({"num_attention_heads": 0}, CheckpointError, "'num_attention_heads' is 0"),
    "heads indivisible": ({"num_key_value_heads": 3}, CheckpointError, "4 attention heads are no multiple of 3"),
    "layers negative": ({"num_hidden_layers": -1}, CheckpointError, "'num_hidden_layers' is -1"),
    "layers beyond reason": ({"num_hidden_layers": 2**30}, CheckpointError, "from 1 to 10000"),
    "layers too many": (
        {"num_hidden_layers": 4},
        CheckpointError,
        r"'model.layers.3.self_attn.q_proj.weight' and 8 more",
    ),
    "layers too few": ({"num_hidden_layers": 2}, UserWarning, "9 tensors that llama does not use"),
    "odd head_dim": ({"head_dim": 31}, CheckpointError, "head_dim is 31; RoPE needs an even"),
    "other hidden_size": ({"hidden_size": 48}, CheckpointError, r"'model.embed_tokens.weight' has shape \[96, 64\]"),
    "eps a list": ({"rms_norm_eps": []}, CheckpointError, r"'rms_norm_eps' is \[\]; expected a finite number"),
    "eps too large": ({"rms_norm_eps": 2}, CheckpointError, "rms_norm_eps is 2.0"),
    "huge integer": ({"rms_norm_eps": 10**400}, CheckpointError, "'rms_norm_eps'"),
    "activation": ({"hidden_act": "relu"}, UnsupportedModel, "hidden_act 'relu'.* silu"),
    "negative eos": ({"eos_token_id": [-1]}, CheckpointError, r"'eos_token_id' is \[-1\]; expected a token id"),
    "model type": ({"model_type": "mamba9"}, UnsupportedModel, "'mamba9'.* LlamaForCausalLM, .*gemma3"),
    "class": ({"architectures": ["BertModel"]}, UnsupportedModel, "'BertModel'.* LlamaForCausalLM"),
    "contradiction": ({"model_type": "qwen2"}, CheckpointError, "'qwen2' contradicts"),
    "no model type": ({"model_type": None, "architectures": None}, CheckpointError, "neither 'model_type' nor"),
    "classes ill-typed": ({"architectures": "Llama"}, CheckpointError, "'architectures' is 'Llama'"),
    "quantized": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        UnsupportedModel,
        "quantized by bitsandbytes",
    ),
    "rope type": ({"rope_scaling": {"rope_type": "ntk9"}}, UnsupportedModel, "'ntk9' is not implemented.*yarn"),
    "rope ill-typed": ({"rope_scaling": [1]}, CheckpointError, r"'rope_scaling' is \[1\]; expected an object"),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, CheckpointError, "'rope_scaling.factor' is missing"),
    "rope factor null": (
        {"rope_scaling": {"type": "linear", "factor": 0}},
        CheckpointError,
        "'rope_scaling.factor' is 0",
    ),
    "llama3 factors": ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, CheckpointError, "0 < low_freq_factor <"),
    "longrope factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        CheckpointError,
        "short_factor has 1 values; expected 16",
    ),
    "layer type": (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "x", "y"]},
        UnsupportedModel,
        "layer type 'x'",
    ),
    "experts a string": (
        {"model_type": "qwen3_moe", "architectures": None, "num_experts": "8"},
        CheckpointError,
        "'num_experts' is '8'",
    ),
    "more experts taken than there are": (
        {"model_type": "mixtral", "architectures": None, "num_local_experts": 2, "num_experts_per_tok": 3},
        CheckpointError,
        "a token takes 3 of 2 experts",
    ),
    "dense layers ill-typed": (
        {"model_type": "qwen3_moe", "architectures": None, "mlp_only_layers": [True]},
        CheckpointError,
        r"'mlp_only_layers' is \[True\]; expected a list of layers",
    ),
    "a step of nothing": (
        {"model_type": "qwen3_moe", "architectures": None, "decoder_sparse_step": 0},
        CheckpointError,
        "'decoder_sparse_step' is 0",
    ),
    "sliding without window": (
        {"model_type": "qwen3", "architectures": None, "layer_types": ["sliding_attention"] * 3},
        CheckpointError,
        "no sliding_window is in use",
    ),
    "layer types too few": (
        {"model_type": "qwen3", "architectures": None, "layer_types": ["full_attention"]},
        CheckpointError,
        "a list of 3 layer types",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(case: str, folder: Path) -> None:
    fields, error, message = BAD_CONFIGS[case]
    edit(folder, **fields)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)


ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1, 3, 2**31, 10**400, 0.5, -0.5, 1e300, float("inf"), float("nan"), "", "x", [], [0], [None],
    ["x"], {}, {"x": 1}, {"rope_type": None}, {"rope_type": 3}, {"type": "yarn", "factor": "x"}, {"full_attention": 3},
    {"full_attention": {"rope_type": "linear"}}, {"sliding_attention": {"rope_theta": -1}},
]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2 with windows", "mixtral", "qwen3_moe", "gemma3"])
def test_any_value_of_any_field_gives_an_error_or_a_config(name: str, saved: Callable[[str], Path]) -> None:
    values = json.loads((saved(name) / "config.json").read_text())
    fields = [*values, "rope_scaling", "rope_theta", "partial_rotary_factor", "text_config", "quantization_config"]
    sound = 0
    for field, odd in itertools.product(fields, ODD_VALUES):
        with warnings.catch_warnings(), contextlib.suppress(CheckpointError, UnsupportedModel):
            warnings.simplefilter("ignore")
            validate(read_config({**values, field: odd}, {}, "config.json"), "config.json")
            sound += 1
    assert 0 < sound < len(fields) * len(ODD_VALUES)
