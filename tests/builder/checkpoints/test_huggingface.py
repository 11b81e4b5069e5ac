"""Hugging Face folders: every architecture against transformers, both spellings of RoPE, and everything refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.masking_utils import sliding_window_causal_mask_function

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.checkpoints.huggingface import round_to_storage
from aotllm.builder.checkpoints.huggingface_config import read_config
from aotllm.builder.checkpoints.validate import validate
from aotllm.builder.config import RopeConfig
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.checkpoints.tiny_models import MODELS, make_model, state


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Any:
    """Reading a sound checkpoint says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a model of `MODELS`, saved once."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
            make_model(name).save_pretrained(folders[name])
        return folders[name]

    return save


@pytest.fixture
def folder(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A private copy of the llama folder, to be changed."""
    return Path(shutil.copytree(saved("llama"), tmp_path / "llama"))


def edit(folder: Path, file: str = "config.json", drop: tuple[str, ...] = (), **fields: Any) -> None:
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    content = {key: value for key, value in content.items() if key not in drop}
    (folder / file).write_text(json.dumps({**content, **fields}))


def assert_same_tensors(folder: Path, model: transformers.PreTrainedModel) -> None:
    with open_checkpoint(folder) as checkpoint:
        expected = state(model)
        infos = checkpoint.tensors()
        assert set(infos) == set(expected)
        for name, weight in expected.items():
            assert infos[name].shape == weight.shape
            np.testing.assert_array_equal(checkpoint.read(name), weight)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_that_of_transformers(name: str, saved: Callable[[str], Path]) -> None:
    assert_same_tensors(saved(name), make_model(name))


@pytest.mark.parametrize("name", MODELS)
def test_config_says_what_the_model_of_transformers_does(name: str, saved: Callable[[str], Path]) -> None:
    model = make_model(name)
    config, theirs, attention = open_checkpoint(saved(name)).config, model.config, model.model.layers[0].self_attn
    assert config.architecture == name.split()[0]
    assert (config.vocab_size, config.hidden_size) == tuple(model.model.embed_tokens.weight.shape)
    assert config.intermediate_size == model.model.layers[0].mlp.up_proj.out_features
    assert config.num_layers == len(model.model.layers)
    assert config.num_heads * config.head_dim == attention.q_proj.out_features
    assert config.num_kv_heads * config.head_dim == attention.k_proj.out_features
    assert config.head_dim == attention.head_dim
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.attention_out_bias == (attention.o_proj.bias is not None)
    assert config.mlp_bias == (model.model.layers[0].mlp.up_proj.bias is not None)
    assert config.bos_token_id == 1
    assert config.eos_token_ids == (2,)
    assert (config.query_scale or config.head_dim**-0.5) == attention.scaling
    assert config.attn_logit_softcap == (getattr(theirs, "attn_logit_softcapping", None) or 0)
    assert config.final_logit_softcap == (getattr(theirs, "final_logit_softcapping", None) or 0)
    windows = tuple(getattr(layer.self_attn, "sliding_window", None) or 0 for layer in model.model.layers)
    if name.startswith("mistral"):
        windows = (theirs.sliding_window or 0,) * config.num_layers
    assert tuple(config.window(layer) for layer in range(config.num_layers)) == windows


@pytest.mark.parametrize("name", ["qwen2 with windows", "gemma2", "gemma3"])
def test_windows_where_layer_types_are_not_listed(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Older files leave the pattern to the family."""
    folder = Path(shutil.copytree(saved(name), tmp_path / "old"))
    edit(folder, drop=("layer_types", "_sliding_window_pattern"))
    layers = make_model(name).model.layers
    assert open_checkpoint(folder).config.layer_windows == tuple(
        layer.self_attn.sliding_window or 0 for layer in layers
    )


def test_stated_sliding_window_pattern_of_gemma3(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("gemma3"), tmp_path / "old"))
    edit(folder, drop=("layer_types", "_sliding_window_pattern"), sliding_window_pattern=3)
    assert open_checkpoint(folder).config.layer_windows == (24, 24, 0, 24, 24, 0, 24)


@pytest.mark.parametrize(
    ("name", "drop", "nulls", "attention", "logits"),
    [
        ("gemma2", ("attn_logit_softcapping", "final_logit_softcapping"), (), 50.0, 30.0),
        ("gemma2", (), ("attn_logit_softcapping", "final_logit_softcapping"), 0.0, 0.0),
        ("gemma3", ("attn_logit_softcapping", "final_logit_softcapping"), (), 0.0, 0.0),
    ],
)
def test_softcaps_absent_and_null(
    name: str,
    drop: tuple[str, ...],
    nulls: tuple[str, ...],
    attention: float,
    logits: float,
    saved: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Absent is the family's default, null is off."""
    folder = Path(shutil.copytree(saved(name), tmp_path / "edited"))
    edit(folder, drop=drop, **dict.fromkeys(nulls))
    config = open_checkpoint(folder).config
    assert (config.attn_logit_softcap, config.final_logit_softcap) == (attention, logits)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama"])
def test_norm_offset_activation_and_embedding_scale(name: str, saved: Callable[[str], Path]) -> None:
    """Measured on the modules of transformers themselves."""
    model, config = make_model(name), open_checkpoint(saved(name)).config
    norm = model.model.norm
    with torch.no_grad():
        norm.weight.zero_()
        gain = norm(torch.tensor([[1.0, -1.0] * (config.hidden_size // 2)]))[0, 0].item()
        assert gain == pytest.approx(config.rms_norm_weight_offset, abs=1e-4)
        embedded = model.model.embed_tokens(torch.tensor([3]))[0]
        scale = np.float32(config.embedding_scale)
        np.testing.assert_array_equal(embedded, model.model.embed_tokens.weight[3].numpy() * scale)
        x = torch.linspace(-3, 3, 13)
        ours = torch.nn.functional.silu(x) if config.hidden_act == "silu" else gelu_tanh(x)
        torch.testing.assert_close(model.model.layers[0].mlp.act_fn(x), ours)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def test_window_counts_the_query_itself() -> None:
    """`ModelConfig.layer_windows` takes `sliding_window` as it is, because transformers means the same by it."""
    sees = sliding_window_causal_mask_function(3)
    zero, query = torch.tensor(0), torch.tensor(5)
    assert [key for key in range(8) if sees(zero, zero, query, torch.tensor(key))] == [3, 4, 5]


@pytest.mark.parametrize(
    ("dtype", "storage", "stored_type"),
    [(torch.float32, "f32", np.float32), (torch.float16, "f16", np.float16), (torch.bfloat16, "bf16", np.uint16)],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_storage_formats(name: str, dtype: torch.dtype, storage: str, stored_type: type, tmp_path: Path) -> None:
    model = make_model(name, dtype)
    model.save_pretrained(tmp_path)
    assert_same_tensors(tmp_path, model)
    with open_checkpoint(tmp_path) as checkpoint:
        for tensor, info in checkpoint.tensors().items():
            stored = checkpoint.read_stored(tensor)
            bits = model.state_dict()[tensor].contiguous()
            assert (info.storage, stored.dtype, stored.nbytes) == (storage, stored_type, info.nbytes)
            assert stored.tobytes() == bits.view(torch.int16 if storage != "f32" else torch.int32).numpy().tobytes()
        scale = model.model.embed_tokens.embed_scale.to(dtype).float().item() if name == "gemma3" else 1.0
        assert checkpoint.config.embedding_scale == scale


@pytest.mark.parametrize("hidden", [640, 1152, 2304, 2560, 3584, 3840, 5376, 4608])
def test_embedding_scale_rounds_as_torch_does(hidden: int) -> None:
    halfway = (1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11)  # ties of bf16 and f16, down and up
    for storage, dtype in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)):
        for value in (hidden**0.5, *halfway):
            assert round_to_storage(value, storage) == torch.tensor(value).to(dtype).float().item()


def test_shards(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_tensors(tmp_path, model)


def test_multimodal_gemma3_reads_its_language_model(tmp_path: Path) -> None:
    """Both prefixes; `text_config` leaves out what transformers has as defaults."""
    model = make_model("gemma3", num_attention_heads=8, num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256)
    for number, (inside, head) in enumerate(
        (("language_model.model.", "language_model."), ("model.language_model.", ""))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights = {inside + name.removeprefix("model."): tensor for name, tensor in state(model).items()}
        weights[head + "lm_head.weight"] = weights[inside + "embed_tokens.weight"]
        weights["vision_tower.patch.weight"] = np.zeros(3, np.float32)
        weights["multi_modal_projector.weight"] = np.zeros(2, np.float32)
        save_file(weights, folder / "model.safetensors")
        text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7}
        text.update(vocab_size=96, sliding_window=24, rope_scaling={"factor": 8.0, "rope_type": "linear"})
        top = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
        edit(folder, eos_token_id=[1, 90], **top)
        with pytest.warns(UserWarning, match=r"2 tensors that gemma3 does not use .*vision_tower"):
            checkpoint = open_checkpoint(folder)
        for name, weight in state(model).items():
            np.testing.assert_array_equal(checkpoint.read(name), weight)
        config = checkpoint.config
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
        assert config.layer_windows == (24, 24, 24, 24, 24, 0, 24)
        assert config.rope == RopeConfig("linear", theta=1e6, factor=8.0)
        assert config.rope_local == RopeConfig(theta=1e4)
        assert config.eos_token_ids == (1, 90)


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


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"

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
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantized by gptq"),
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


def weights_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "missing": (lambda w: w.pop(Q_PROJ), CheckpointError, f"'{Q_PROJ}' is missing"),
    "shape": (
        lambda w: w.update({Q_PROJ: w[Q_PROJ].T.copy()}),
        CheckpointError,
        rf"'{Q_PROJ}' has shape \[64, 128\]; its config asks for \[128, 64\]",
    ),
    "f64": (lambda w: w.update({Q_PROJ: w[Q_PROJ].astype("f8")}), UnsupportedModel, "holds F64 values; .* F32, F16"),
    "i32": (lambda w: w.update({Q_PROJ: w[Q_PROJ].astype("i4")}), UnsupportedModel, "holds I32 values"),
    "extra": (lambda w: w.update(extra=w[Q_PROJ], more=w[Q_PROJ]), UserWarning, "2 tensors .* 'extra', 'more'"),
    "no output": (lambda w: w.pop("lm_head.weight"), CheckpointError, "'lm_head.weight' is missing"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights(case: str, folder: Path) -> None:
    change, error, message = BAD_WEIGHTS[case]
    weights = weights_of(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)


def test_copies_that_carry_nothing_are_ignored_silently(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("llama tied"), tmp_path / "tied"))
    weights = weights_of(folder)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    save_file(weights, folder / "model.safetensors")
    assert "lm_head.weight" not in open_checkpoint(folder).tensors()


def shard(folder: Path) -> Path:
    make_model("llama").save_pretrained(folder / "shards", max_shard_size="100KB")
    return folder / "shards"


def edit_map(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    change(content["weight_map"])
    file.write_text(json.dumps(content))


BAD_SHARDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard is gone": (lambda f: min(f.glob("model-0*")).unlink(), "the shard model-00001-of-.* is missing"),
    "tensor elsewhere": (lambda f: edit_map(f, lambda m: m.update(x=m[Q_PROJ])), "tensor 'x' is not in model-0"),
    "outside the folder": (lambda f: edit_map(f, lambda m: m.update(x="../a")), r"'\.\./a' is not the name of a file"),
    "absolute": (lambda f: edit_map(f, lambda m: m.update(x="/etc/passwd")), "is not the name of a file"),
    "not a name": (lambda f: edit_map(f, lambda m: m.update(x=3)), "3 is not the name of a file"),
    "empty": (lambda f: edit_map(f, lambda m: m.clear()), "'weight_map' is missing"),
    "not JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json: not valid JSON"),
    "twice": (
        lambda f: shutil.copy(min(f.glob("model-0*")), max(f.glob("model-0*"))),
        "is not in model-0|is there twice",
    ),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_bad_shards(case: str, tmp_path: Path) -> None:
    damage, message = BAD_SHARDS[case]
    folder = shard(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BAD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config not JSON": (lambda f: (f / "config.json").write_text("{oops"), r"config.json: not valid JSON"),
    "config not an object": (lambda f: (f / "config.json").write_text("[]"), "config.json: expected a JSON object"),
    "config not UTF-8": (lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json: not valid JSON"),
    "config twice": (lambda f: (f / "config.json").write_text('{"a":1,"a":2}'), "the key 'a' appears twice"),
    "config nested": (lambda f: (f / "config.json").write_text("[" * 10**6), "config.json: not valid JSON"),
    "generation config": (lambda f: (f / "generation_config.json").write_text("3"), "generation_config.json: expected"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "pickled": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "pytorch_model.bin is pickled; convert it",
    ),
    "weights a pipe": (
        lambda f: pipe(f / "model.safetensors"),
        "model.safetensors: cannot be read .not a regular file",
    ),
    "generation config a pipe": (lambda f: pipe(f / "generation_config.json"), "json: cannot be read .not a regular"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors: cannot be read"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case: str, folder: Path) -> None:
    damage, message = BAD_FILES[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_reading(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="there is no tensor 'nonsense'"):
        checkpoint.read("nonsense")
    view = checkpoint.read(Q_PROJ)
    assert not view.flags.writeable
    before = view.copy()
    digest = checkpoint.tensor_digest(Q_PROJ)
    checkpoint.close()
    np.testing.assert_array_equal(view, before)
    with pytest.raises(CheckpointError, match="the checkpoint is closed"):
        checkpoint.read(Q_PROJ)
    assert open_checkpoint(folder).tensor_digest(Q_PROJ) == digest


ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1, 3, 2**31, 10**400, 0.5, -0.5, 1e300, float("inf"), float("nan"), "", "x", [], [0], [None],
    ["x"], {}, {"x": 1}, {"rope_type": None}, {"rope_type": 3}, {"type": "yarn", "factor": "x"}, {"full_attention": 3},
    {"full_attention": {"rope_type": "linear"}}, {"sliding_attention": {"rope_theta": -1}},
]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2 with windows", "gemma3"])
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
