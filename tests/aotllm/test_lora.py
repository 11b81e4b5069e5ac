"""Reading PEFT adapters: what plain LoRA means is read, everything else is refused with its reason."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from aotllm import _runtime
from aotllm.errors import CheckpointError, InvalidRequest, UnsupportedModel
from aotllm.lora import LoraUpdate, read_lora, runtime_adapter

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 6,
    "lora_dropout": 0.05,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "target_modules": ["q_proj", "down_proj"],
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
PREFIX = "base_model.model.model."
Q, DOWN = "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"


def tensors(module: str, rank: int = 2, size_in: int = 4, size_out: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(module) + rank)
    return {
        f"{PREFIX}{module}.lora_A.weight": rng.normal(size=(rank, size_in)).astype(np.float32),
        f"{PREFIX}{module}.lora_B.weight": rng.normal(size=(size_out, rank)).astype(np.float32),
    }


PLAIN = {**tensors(Q), **tensors(DOWN)}


def write(folder: Path, weights: dict[str, np.ndarray] | bytes | None = None, **config: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    weights = PLAIN if weights is None else weights
    (folder / "adapter_model.safetensors").write_bytes(weights if isinstance(weights, bytes) else save(weights))
    return folder


def scale_of(updates: list[LoraUpdate], weights: dict[str, np.ndarray], module: str) -> float:
    update = next(u for u in updates if f"layers.{u.layer}." in module and module.endswith(f"{u.module}_proj"))
    np.testing.assert_array_equal(update.a, weights[f"{PREFIX}{module}.lora_A.weight"])
    ratio = update.b / weights[f"{PREFIX}{module}.lora_B.weight"]
    assert np.ptp(ratio) < 1e-5
    return float(ratio.mean())


def test_updates_come_by_layer_and_module(tmp_path: Path) -> None:
    names = ["mlp.down_proj", "self_attn.v_proj", "mlp.gate_proj", "self_attn.q_proj", "mlp.up_proj",
             "self_attn.o_proj", "self_attn.k_proj"]  # fmt: skip
    weights = {k: v for layer in (10, 2) for name in names for k, v in tensors(f"layers.{layer}.{name}").items()}
    updates = read_lora(write(tmp_path, weights, target_modules="all-linear"))
    modules = ["q", "k", "v", "o", "gate", "up", "down"]
    assert [(u.layer, u.module) for u in updates] == [(layer, m) for layer in (2, 10) for m in modules]
    assert all(u.a.shape == (2, 4) and u.b.shape == (3, 2) for u in updates)
    assert len(runtime_adapter(updates)) == 14


@pytest.mark.parametrize(
    ("config", "rank", "q_scale", "down_scale"),
    [
        ({}, 2, 3.0, 3.0),
        ({"r": 16}, 16, 6 / 16, 6 / 16),
        ({"r": 16, "use_rslora": True}, 16, 6 / 4, 6 / 4),
        ({"lora_alpha": 1.5}, 2, 0.75, 0.75),
        ({"lora_alpha": 0}, 2, 0.0, 0.0),
        ({"alpha_pattern": {"q_proj": 8}}, 2, 4.0, 3.0),
        ({"alpha_pattern": {"model.layers.1.mlp.down_proj": 8}}, 2, 3.0, 4.0),
        ({"alpha_pattern": {"^model.layers.1.mlp.down_proj": 8}}, 2, 3.0, 4.0),
        ({"alpha_pattern": {"^layers.1.mlp.down_proj": 8, "proj": 8}}, 2, 3.0, 3.0),
        ({"alpha_pattern": {r"layers\.(0|5)\..*": 8, "q_proj": 2}}, 2, 4.0, 3.0),
        ({"alpha_pattern": {".*down_proj": 4, ".*": 2}}, 2, 1.0, 2.0),
        ({"layers_to_transform": [0, 1], "fan_in_fan_out": True, "init_lora_weights": "gaussian"}, 2, 3.0, 3.0),
        ({"layers_to_transform": None, "modules_to_save": [], "init_lora_weights": False}, 2, 3.0, 3.0),
    ],
    ids=str,
)
def test_scale(tmp_path: Path, config: dict[str, Any], rank: int, q_scale: float, down_scale: float) -> None:
    weights = {**tensors(Q, rank), **tensors(DOWN, rank)}
    updates = read_lora(write(tmp_path, weights, **config))
    assert scale_of(updates, weights, Q) == pytest.approx(q_scale)
    assert scale_of(updates, weights, DOWN) == pytest.approx(down_scale)


def test_rank_pattern(tmp_path: Path) -> None:
    weights = {**tensors(Q, 8), **tensors(DOWN, 2)}
    updates = read_lora(write(tmp_path, weights, rank_pattern={"q_proj": 8}))
    assert [u.a.shape[0] for u in updates] == [8, 2]
    assert scale_of(updates, weights, Q) == pytest.approx(6 / 8)
    assert scale_of(updates, weights, DOWN) == pytest.approx(6 / 2)


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model."])
def test_prefixes_of_the_base_model(tmp_path: Path, prefix: str) -> None:
    weights = {name.replace(PREFIX, f"base_model.model.{prefix}"): value for name, value in PLAIN.items()}
    assert [(u.layer, u.module) for u in read_lora(write(tmp_path, weights))] == [(0, "q"), (1, "down")]


def test_half_precision(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save as save_torch

    expected = read_lora(write(tmp_path, {k: np.round(v * 8) / 8 for k, v in PLAIN.items()}))
    for dtype in (torch.float16, torch.bfloat16):
        halves = {k: torch.tensor(np.round(v * 8) / 8).to(dtype) for k, v in PLAIN.items()}
        for got, want in zip(read_lora(write(tmp_path, save_torch(halves))), expected, strict=True):
            np.testing.assert_array_equal(got.a, want.a)
            np.testing.assert_array_equal(got.b, want.b)


def renamed(old: str, new: str) -> dict[str, np.ndarray]:
    return {name.replace(old, new): value for name, value in PLAIN.items()}


def replaced(suffix: str, value: np.ndarray) -> dict[str, np.ndarray]:
    assert any(name.endswith(suffix) for name in PLAIN)
    return {name: value if name.endswith(suffix) else old for name, old in PLAIN.items()}


def without(suffix: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in PLAIN.items() if not name.endswith(suffix)}


ONES = np.ones((2, 4), np.float32)
BAD_CONFIGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"peft_type": "LOHA"}, UnsupportedModel, "'peft_type' is 'LOHA'; only 'LORA'"),
    ({"peft_type": None}, CheckpointError, "'peft_type' is missing"),
    ({"use_dora": True}, UnsupportedModel, "'use_dora' is set"),
    ({"lora_bias": True}, UnsupportedModel, "'lora_bias' is set"),
    ({"modules_to_save": ["lm_head"]}, UnsupportedModel, "'modules_to_save' is set"),
    ({"trainable_token_indices": [1]}, UnsupportedModel, "'trainable_token_indices' is set"),
    ({"alora_invocation_tokens": [1]}, UnsupportedModel, "'alora_invocation_tokens' is set"),
    ({"layer_replication": [[0, 2]]}, UnsupportedModel, "'layer_replication' is set"),
    ({"bias": "all"}, UnsupportedModel, "'bias' is 'all'; only 'none'"),
    ({"bias": 1}, CheckpointError, "'bias' is 1; expected a string"),
    ({"init_lora_weights": "pissa_niter_4"}, UnsupportedModel, "'pissa_niter_4', which changes the base model"),
    ({"init_lora_weights": 1}, UnsupportedModel, "'init_lora_weights' is '1'"),
    ({"r": 0}, CheckpointError, "'r' is 0; expected an integer from 1"),
    ({"r": None}, CheckpointError, "'r' is missing"),
    ({"r": 4}, CheckpointError, "has shape [2, 4]; expected [4, n]"),
    ({"r": 512}, UnsupportedModel, "has rank 512; at most 256"),
    ({"rank_pattern": {"down_proj": 3}}, CheckpointError, "has shape [2, 4]; expected [3, n]"),
    ({"rank_pattern": {"down_proj": -1}}, CheckpointError, "'rank_pattern.down_proj' is -1"),
    ({"rank_pattern": [1]}, CheckpointError, "'rank_pattern' is [1]; expected an object"),
    ({"lora_alpha": None}, CheckpointError, "'lora_alpha' is missing"),
    ({"lora_alpha": "16"}, CheckpointError, "'lora_alpha' is '16'; expected a finite number"),
    ({"lora_alpha": 1e300}, CheckpointError, "not finite once scaled"),
    ({"use_rslora": "yes"}, CheckpointError, "'use_rslora' is 'yes'; expected true or false"),
    ({"alpha_pattern": {"q_proj": None}}, CheckpointError, "'alpha_pattern.q_proj' is missing"),
    ({"alpha_pattern": {"(q_proj": 8}}, CheckpointError, "'(q_proj' of 'alpha_pattern' is no regular expression"),
    ({"alpha_pattern": {"(.*)*x": 8}}, UnsupportedModel, "too complex, from '(.*)*x' on"),
    ({"alpha_pattern": {"(.|.)" * 30 + "!": 8}}, UnsupportedModel, "too complex"),
    ({"alpha_pattern": {".*.*.*.*!": 8}}, UnsupportedModel, "too complex"),
    ({"alpha_pattern": {f".*.*{i}": 8 for i in range(1000)}}, UnsupportedModel, "too complex"),
    ({"target_modules": ["q_proj"]}, CheckpointError, "'model.layers.1.mlp.down_proj', but 'target_modules' lacks it"),
    ({"target_modules": [1]}, CheckpointError, "'target_modules' is [1]; expected a list of module names"),
    ({"layers_to_transform": 0}, CheckpointError, "but 'layers_to_transform' lacks it"),
    ({"layers_to_transform": ["0"]}, CheckpointError, "'layers_to_transform' is ['0']"),
]  # fmt: skip
BAD_WEIGHTS: list[tuple[dict[str, np.ndarray], type[Exception], str]] = [
    ({}, CheckpointError, "no tensors"),
    (without("q_proj.lora_B.weight"), CheckpointError, "is lora_A of a pair without lora_B"),
    (without("q_proj.lora_A.weight"), CheckpointError, "is lora_B of a pair without lora_A"),
    (renamed("lora_A.weight", "lora_A.bias"), UnsupportedModel, "is not of a plain LoRA"),
    (renamed("base_model.model.model.", "model."), UnsupportedModel, "is not of a plain LoRA"),
    ({**PLAIN, f"{PREFIX}{Q}.lora_magnitude_vector": ONES}, UnsupportedModel, "is not of a plain LoRA"),
    (renamed("model.model.layers.1.mlp.down_proj", "model.lm_head"), UnsupportedModel, "updates 'lm_head'; only the"),
    (renamed("down_proj", "experts.0.down_proj"), UnsupportedModel, "only the q, k, v, o, gate, up, down projections"),
    (renamed("layers.1.", "layers.1000."), UnsupportedModel, "updates 'model.layers.1000.mlp.down_proj'"),
    (replaced("q_proj.lora_A.weight", ONES[:, :, None]), CheckpointError, "has shape [2, 4, 1]; expected [2, n]"),
    (replaced("q_proj.lora_B.weight", ONES[:, :1]), CheckpointError, "has shape [2, 1]; expected [n, 2]"),
    (replaced("q_proj.lora_A.weight", ONES[:, :0]), CheckpointError, "has shape [2, 0]; expected [2, n]"),
    (replaced("q_proj.lora_A.weight", ONES * np.nan), CheckpointError, "not finite"),
    (replaced("q_proj.lora_B.weight", ONES.T * np.inf), CheckpointError, "not finite"),
    (replaced("q_proj.lora_A.weight", ONES.astype(np.float64)), UnsupportedModel, "holds F64 values"),
    ({**PLAIN, **renamed("model.model.", "model.")}, CheckpointError, "two updates of 'q' in layer 0"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "error", "message"), BAD_CONFIGS, ids=lambda x: str(x)[:60])
def test_bad_configurations(tmp_path: Path, config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        read_lora(write(tmp_path, **config))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(("weights", "error", "message"), BAD_WEIGHTS, ids=lambda x: str(x)[:60])
def test_bad_tensors(tmp_path: Path, weights: dict[str, np.ndarray], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        read_lora(write(tmp_path, weights, target_modules="all-linear"))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="adapter_config.json: cannot be read"):
        read_lora(tmp_path / "nowhere")
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "other")
    with pytest.raises(CheckpointError, match="adapter_model.safetensors: cannot be read"):
        read_lora(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="adapter_model.bin is pickled"):
        read_lora(tmp_path)


WHOLE = save(PLAIN)
TEXT = json.dumps(CONFIG).encode()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_files_never_crash(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("adapter")
    for name, whole in (("adapter_config.json", TEXT), ("adapter_model.safetensors", WHOLE)):
        damaged = bytearray(whole)
        for _ in range(data.draw(st.integers(0, 2))):
            damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        (folder / name).write_bytes(damaged[: data.draw(st.just(len(whole)) | st.integers(0, len(whole)))])
    with contextlib.suppress(CheckpointError, UnsupportedModel):
        read_lora(folder)


@pytest.mark.parametrize(
    ("module", "a", "b", "message"),
    [
        ("q_proj", (2, 4), (3, 2), 'expected q, k, v, o, gate, up or down, got "q_proj"'),
        ("q", (2,), (3, 2), "a: expected two dimensions, got 1"),
        ("q", (2, 4), (3, 2, 1), "b: expected two dimensions, got 3"),
        ("q", (2, 4), (3, 4), "b: expected 2 columns, the rows of a, got 4"),
    ],
)
def test_the_runtime_checks_an_update(module: str, a: tuple[int, ...], b: tuple[int, ...], message: str) -> None:
    adapter = _runtime.Adapter()
    with pytest.raises(InvalidRequest) as caught:
        adapter.add(0, module, np.ones(a, np.float32), np.ones(b, np.float32))
    assert message in str(caught.value)
    assert len(adapter) == 0
