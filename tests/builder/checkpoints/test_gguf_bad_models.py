"""Well-formed GGUF files that are no model, or one that is not implemented."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.checkpoints.gguf import GgufCheckpoint
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.checkpoints import raw_gguf as raw
from tests.builder.checkpoints.raw_gguf import RawGguf, RawTensor, tiny_llama


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Any:
    """Reading a sound checkpoint says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def edited(change: Callable[[RawGguf], Any]) -> RawGguf:
    file = tiny_llama()
    change(file)
    return file


def set_key(name: str, kind: int, content: Any, architecture: str = "llama") -> RawGguf:
    def change(file: RawGguf) -> None:
        file.keys = [
            (str(key).replace("llama.", f"{architecture}."), k, architecture if v == "llama" else v)
            for key, k, v in file.keys
        ]
        file.keys = [key for key in file.keys if key[0] != name] + [(name, kind, content)]

    return edited(change)


def experts(count: int = 8, used: int = 2, **others: float) -> RawGguf:
    """The dense llama, whose keys speak of experts, and which has no MLP."""

    def change(file: RawGguf) -> None:
        values = {"count": count, "used_count": used, **others}
        kinds = {int: raw.U32, float: raw.F32}
        file.keys += [(f"llama.expert_{name}", kinds[type(value)], value) for name, value in values.items()]
        file.tensors = [tensor for tensor in file.tensors if ".ffn_" not in str(tensor.name) or "norm" in tensor.name]

    return edited(change)


def reshaped_experts(name: str, dims: tuple[int, ...]) -> RawGguf:
    file = raw.tiny_experts()
    tensor = next(tensor for tensor in file.tensors if name in str(tensor.name))
    tensor.dims, tensor.data = dims, bytes(4 * int(np.prod(dims)))
    return file


def drop_key(name: str) -> RawGguf:
    return edited(lambda file: setattr(file, "keys", [key for key in file.keys if key[0] != name]))


def drop_tensor(name: str) -> RawGguf:
    return edited(lambda file: setattr(file, "tensors", [t for t in file.tensors if t.name != name]))


def add_tensor(name: str, *dims: int, type_: int = 0) -> RawGguf:
    return edited(lambda file: file.tensors.append(RawTensor(name, dims, type_, bytes(4 * int(np.prod(dims))))))


BAD_MODELS: dict[str, tuple[RawGguf, type[Exception], str]] = {
    "no architecture": (drop_key("general.architecture"), CheckpointError, "'general.architecture' is missing"),
    "other architecture": (
        set_key("general.architecture", raw.STRING, "mamba9"),
        UnsupportedModel,
        "'mamba9' is not implemented; known are llama, qwen2, qwen3, qwen3moe, gemma2, gemma3",
    ),
    "vocabulary only": (edited(lambda f: f.tensors.clear()), CheckpointError, "it holds a vocabulary only, no weights"),
    "no embeddings": (drop_tensor("token_embd.weight"), CheckpointError, "'token_embd.weight' is missing$"),
    "no heads": (drop_key("llama.attention.head_count"), CheckpointError, "'llama.attention.head_count' is missing"),
    "no eps": (drop_key("llama.attention.layer_norm_rms_epsilon"), CheckpointError, "rms_epsilon' is missing"),
    "no layers": (drop_key("llama.block_count"), CheckpointError, "'llama.block_count' is missing"),
    "no context length": (drop_key("llama.context_length"), CheckpointError, "'llama.context_length' is missing"),
    "heads a string": (set_key("llama.attention.head_count", raw.STRING, "2"), CheckpointError, "is '2'; expected an"),
    "heads zero": (set_key("llama.attention.head_count", raw.U32, 0), CheckpointError, "is 0; expected an integer"),
    "heads indivisible": (set_key("llama.attention.head_count_kv", raw.U32, 3), CheckpointError, "no multiple of 3"),
    "heads per layer": (
        set_key("llama.attention.head_count_kv", raw.ARRAY, (raw.U32, [1, 2])),
        UnsupportedModel,
        "differs from layer to layer",
    ),
    "heads an array of nothing": (
        set_key("llama.attention.head_count_kv", raw.ARRAY, (raw.U32, [])),
        CheckpointError,
        "an array of one per layer",
    ),
    "more layers than tensors": (
        set_key("llama.block_count", raw.U32, 2),
        CheckpointError,
        r"'blk.1.attn_q.weight' and 8 more is missing; llama with 2 layers needs 20",
    ),
    "layers beyond reason": (set_key("llama.block_count", raw.U32, 2**31), CheckpointError, "from 1 to 10000"),
    "wide K": (
        set_key("llama.attention.key_length", raw.U32, 8),
        UnsupportedModel,
        "key_length 8 and value_length 4 differ",
    ),
    "experts without tensors": (
        experts(),
        CheckpointError,
        r"'blk.0.ffn_gate_inp.weight' and 24 more is missing; mixtral with 1 layers",
    ),
    "more experts taken than there are": (experts(used=9), CheckpointError, "a token takes 9 of 8 experts"),
    "experts beyond reason": (experts(count=2**20), CheckpointError, "1048576 experts; expected 0"),
    "experts that nobody takes": (experts(used=0), CheckpointError, "expert_used_count' is 0"),
    "a shared expert": (experts(shared_count=1), UnsupportedModel, "or shared ones, are not implemented"),
    "another gating function": (experts(gating_func=2), UnsupportedModel, "expert_gating_func"),
    "an expert too few": (
        reshaped_experts("ffn_up_exps", (8, 12, 1)),
        CheckpointError,
        "'blk.0.ffn_up_exps.weight' is missing; mixtral with 1 layers",
    ),
    "an expert too many": (
        reshaped_experts("ffn_up_exps", (8, 12, 3)),
        UserWarning,
        r"1 tensors that mixtral does not use .*'model.layers.0.mlp.experts.2.up_proj.weight'",
    ),
    "experts of another shape": (
        reshaped_experts("ffn_down_exps", (8, 12, 2)),
        CheckpointError,
        r"'blk.0.ffn_down_exps.weight' has shape \[12, 8\]; its config asks for \[8, 12\]",
    ),
    "experts in two dimensions": (
        reshaped_experts("ffn_down_exps", (12, 16)),
        CheckpointError,
        "'blk.0.ffn_down_exps.weight' and 1 more is missing",
    ),
    "scaled experts": (experts(weights_scale=2.5), UnsupportedModel, "expert_weights_scale is not implemented"),
    "groups of experts": (experts(group_count=4), UnsupportedModel, "groups of experts"),
    "experts of another family": (
        set_key("qwen2.expert_count", raw.U32, 8, architecture="qwen2"),
        UnsupportedModel,
        "experts of a qwen2 model",
    ),
    "infinite base": (set_key("llama.rope.freq_base", raw.F32, np.inf), CheckpointError, "freq_base' is inf"),
    "part of a head rotates": (
        set_key("llama.rope.dimension_count", raw.U32, 2),
        UnsupportedModel,
        "a llama model must rotate whole heads",
    ),
    "longrope": (set_key("llama.rope.scaling.type", raw.STRING, "longrope"), UnsupportedModel, "'longrope' is not"),
    "missing tensor": (drop_tensor("blk.0.ffn_up.weight"), CheckpointError, "'blk.0.ffn_up.weight' is missing"),
    "wrong shape": (
        edited(lambda f: setattr(f.tensors[7], "dims", (12, 8))),
        CheckpointError,
        r"'blk.0.ffn_gate.weight' has shape \[8, 12\]; its config asks for \[12, 8\]",
    ),
    "rope_freqs of other length": (add_tensor("rope_freqs.weight", 3), CheckpointError, "freq_factors has 3 values"),
    "rope_freqs of zeros": (add_tensor("rope_freqs.weight", 2), CheckpointError, "not finite and above zero"),
    "rope_freqs of two dimensions": (add_tensor("rope_freqs.weight", 2, 1), CheckpointError, r"expected F32 \[head_d"),
    "integers": (edited(lambda f: setattr(f.tensors[1], "type", 26)), UnsupportedModel, "has type I32, which cannot"),
    "unused tensors": (
        add_tensor("v.patch.weight", 2),
        UserWarning,
        r"1 tensors that llama does not use are ignored: 'v.patch.weight'",
    ),
    "leading zero in a name": (add_tensor("blk.00.attn_q.weight", 2), UserWarning, "'blk.00.attn_q.weight'"),
    "two names of one tensor": (
        add_tensor("model.norm.weight", 8),
        CheckpointError,
        "'output_norm.weight' and 'model.norm.weight' are both model.norm.weight",
    ),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models(case: str, tmp_path: Path) -> None:
    file, error, message = BAD_MODELS[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(file.pack())
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


ODD_VALUES: list[tuple[int, Any]] = [
    (raw.BOOL, 1), (raw.U32, 0), (raw.U32, 1), (raw.U32, 3), (raw.U32, 2**32 - 1), (raw.I32, -1), (raw.U64, 2**64 - 1),
    (raw.F32, 0.5), (raw.F32, -1.0), (raw.F32, np.nan), (raw.F64, np.inf), (raw.STRING, ""), (raw.STRING, "yarn"),
    (raw.ARRAY, (raw.U32, [])), (raw.ARRAY, (raw.U32, [1])), (raw.ARRAY, (raw.U32, [1, 2])),
    (raw.ARRAY, (raw.F32, [1])), (raw.ARRAY, (raw.STRING, ["x"])), (raw.ARRAY, (raw.BOOL, [1])),
]  # fmt: skip
KEYS = [
    *(str(name) for name, _, _ in tiny_llama().keys if not str(name).startswith("tokenizer.")),
    *(f"llama.rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "original_context_length")),
    *(f"llama.rope.scaling.yarn_{name}" for name in ("log_multiplier", "ext_factor", "attn_factor", "beta_fast")),
    "llama.attention.key_length", "llama.rope.dimension_count", "llama.rope.scale_linear", "llama.expert_count",
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "general.alignment", "split.count", "split.no",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_any_key_gives_an_error_or_a_model(key: str, tmp_path: Path) -> None:
    sound = 0
    for kind, content in ODD_VALUES:
        file = set_key(key, kind, content)
        if key.startswith("llama.rope.scaling") and not key.endswith("type"):
            file.keys.append(("llama.rope.scaling.type", raw.STRING, "yarn"))
        (tmp_path / "model.gguf").write_bytes(file.pack())
        with warnings.catch_warnings(), contextlib.suppress(CheckpointError, UnsupportedModel):
            warnings.simplefilter("ignore")
            open_checkpoint(tmp_path / "model.gguf").close()
            sound += 1
    assert sound < len(ODD_VALUES)


def test_the_id_that_means_none_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(set_key("tokenizer.ggml.bos_token_id", raw.U32, 2**32 - 1).pack())
    with pytest.warns(UserWarning, match=r"\[4294967295\] are outside the vocabulary"):
        assert open_checkpoint(tmp_path / "model.gguf").config.bos_token_id is None


def test_tiny_llama_is_a_model(tmp_path: Path) -> None:
    """What the cases above start from is sound; its tokens tell nothing of the vocabulary's size, its matrix does."""
    (tmp_path / "no-suffix").write_bytes(tiny_llama().pack())
    checkpoint = open_checkpoint(tmp_path / "no-suffix")
    assert isinstance(checkpoint, GgufCheckpoint)
    assert (checkpoint.config.vocab_size, checkpoint.config.tie_word_embeddings, checkpoint.config.name) == (
        4,
        True,
        "tiny",
    )
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["<s>", "</s>", "a", "é"]
    with pytest.raises(CheckpointError, match="there is no tensor 'rope'"):
        checkpoint.read("rope")
    checkpoint.close()
    with pytest.raises(CheckpointError, match="the checkpoint is closed"):
        checkpoint.read("model.norm.weight")
