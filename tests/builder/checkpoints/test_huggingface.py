"""Hugging Face folders: every architecture against transformers, both spellings of RoPE, and everything refused."""

from __future__ import annotations

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
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers.masking_utils import sliding_window_causal_mask_function

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.checkpoints.huggingface import round_to_storage
from aotllm.builder.config import RopeConfig
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.checkpoints.tiny_models import MODELS, edit, make_model, state


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Any:
    """Reading a sound checkpoint says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


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
    mlps = [layer.mlp for layer in model.model.layers]
    assert [config.has_experts(layer) for layer in range(len(mlps))] == [hasattr(mlp, "experts") for mlp in mlps]
    for mlp in mlps:
        if hasattr(mlp, "experts"):
            router, down = mlp.gate, mlp.experts.down_proj
            assert (config.num_experts, config.num_experts_per_tok) == (len(router.weight), router.top_k)
            assert config.norm_topk_prob == getattr(router, "norm_topk_prob", True)
            assert config.moe_intermediate_size == down.shape[-1]
        else:
            assert config.intermediate_size == mlp.up_proj.out_features
            assert config.mlp_bias == (mlp.up_proj.bias is not None)
    assert config.num_layers == len(model.model.layers)
    assert config.num_heads * config.head_dim == attention.q_proj.out_features
    assert config.num_kv_heads * config.head_dim == attention.k_proj.out_features
    assert config.head_dim == attention.head_dim
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.attention_out_bias == (attention.o_proj.bias is not None)
    assert config.bos_token_id == 1
    assert config.eos_token_ids == (2,)
    assert (config.query_scale or config.head_dim**-0.5) == attention.scaling
    assert config.attn_logit_softcap == (getattr(theirs, "attn_logit_softcapping", None) or 0)
    assert config.final_logit_softcap == (getattr(theirs, "final_logit_softcapping", None) or 0)
    windows = tuple(getattr(layer.self_attn, "sliding_window", None) or 0 for layer in model.model.layers)
    if name.startswith(("mistral", "mixtral")):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As transformers holds them, and saves them where it is told not to go back to the original form."""
    model = make_model(name, dtype)
    model.save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in set(file.keys())
    assert_same_tensors(tmp_path, model)
    source = "model.layers.2.mlp.experts.3.up_proj.weight"
    with open_checkpoint(tmp_path) as checkpoint:
        info = checkpoint.tensors()[source]
        assert (info.nbytes, len(info.shape)) == (checkpoint.read_stored(source).nbytes, 2)


def test_experts_named_as_mixtral_files_name_them(saved: Callable[[str], Path]) -> None:
    with safe_open(saved("mixtral") / "model.safetensors", "pt") as file:
        assert "model.layers.0.block_sparse_moe.experts.4.w2.weight" in set(file.keys())


def test_a_missing_expert_is_named_as_the_file_would(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("qwen3_moe"), tmp_path / "m"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.experts.5.down_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.experts.5.down_proj.weight' is missing"):
        open_checkpoint(folder)


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


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


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
