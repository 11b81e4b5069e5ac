"""GGUF models: every architecture against the Hugging Face reader, block formats, splits, the real SmolLM2."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from aotllm.builder.checkpoints import Checkpoint, open_checkpoint
from aotllm.builder.checkpoints.gguf import GgufCheckpoint, unpermute_rows
from aotllm.builder.config import RopeConfig
from aotllm.errors import UnsupportedModel
from tests.builder.checkpoints import raw_gguf as raw
from tests.builder.checkpoints.raw_gguf import RawGguf, tiny_llama
from tests.builder.checkpoints.tiny_models import (
    MODELS,
    add_metadata,
    gguf_tensors,
    interleave_rows,
    make_model,
    state,
    write_gguf,
)


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Any:
    """Reading a sound checkpoint says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", MODELS)
def test_reads_what_the_hugging_face_folder_says(name: str, tmp_path: Path) -> None:
    """The two formats of one model differ in Gemma's norms alone, and in what GGUF cannot say."""
    model = make_model(name)
    model.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "model.gguf", model)
    ours, theirs = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(tmp_path / "folder")

    gemma = theirs.config.architecture.startswith("gemma")
    assert set(ours.tensors()) == set(theirs.tensors())
    for tensor, weight in state(model).items():
        folded_in = np.float32(1) if gemma and tensor.endswith("norm.weight") else np.float32(0)
        np.testing.assert_array_equal(ours.read(tensor), weight + folded_in)

    expected = replace(theirs.config, name="", rms_norm_eps=float(np.float32(theirs.config.rms_norm_eps)))
    if gemma:
        expected = replace(expected, rms_norm_weight_offset=0.0)
    if expected.architecture == "mistral":  # converters write it as llama, without its window
        expected = replace(expected, architecture="llama", layer_windows=())
    if expected.architecture == "mixtral":
        expected = replace(expected, layer_windows=())
    if expected.architecture == "qwen2":
        expected = replace(expected, layer_windows=())
    assert replace(ours.config, name="") == expected


@pytest.mark.parametrize("type_", [Type.F16, Type.Q4_0, Type.Q8_0], ids=lambda type_: type_.name)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_block_types_of_experts(name: str, type_: Type, tmp_path: Path) -> None:
    """The blocks of an expert are those that it would have alone."""
    model = make_model(name)
    write_gguf(tmp_path / "model.gguf", model, matrix_type=type_)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        experts = {tensor: weight for tensor, weight in state(model).items() if ".experts." in tensor}
        assert len(experts) >= 2 * 3 * 5
        for tensor, weight in experts.items():
            quantized = gguf.quants.quantize(weight, type_)
            info, ours = checkpoint.tensors()[tensor], checkpoint.read_stored(tensor)
            assert (info.shape, info.nbytes, ours.tobytes()) == (weight.shape, quantized.nbytes, quantized.tobytes())
            np.testing.assert_array_equal(checkpoint.read(tensor), gguf.quants.dequantize(quantized, type_))


def test_experts_each_in_a_tensor(tmp_path: Path) -> None:
    """Mixtral files from before experts were stacked."""
    model = make_model("mixtral")
    apart = {}
    for name, weight in gguf_tensors(model).items():
        stem, _, part = name.removesuffix("_exps.weight").rpartition(".")
        if name.endswith("_exps.weight"):
            apart |= {f"{stem}.{part}.{expert}.weight": matrix for expert, matrix in enumerate(weight)}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_metadata(writer, model)
    for name, weight in {**gguf_tensors(model), **apart}.items():
        if not name.endswith("_exps.weight"):
            writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.config.architecture == "mixtral"
        for tensor, weight in state(model).items():
            np.testing.assert_array_equal(checkpoint.read(tensor), weight)


def test_rows_go_back_to_rotate_half_order() -> None:
    rows = np.arange(2 * 6)[:, None] * np.ones((1, 3), int)
    assert unpermute_rows(interleave_rows(rows, 2), 2).tolist() == rows.tolist()
    one_head = np.array([0, 1, 2, 3, 4, 5])
    assert unpermute_rows(one_head, 1).tolist() == [0, 2, 4, 1, 3, 5]


QUANTIZABLE = [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4]
LARGE_BLOCKS = [Type.TQ1_0, Type.TQ2_0]


@pytest.mark.parametrize("type_", [*QUANTIZABLE, *LARGE_BLOCKS], ids=lambda type_: type_.name)
def test_types_that_the_gguf_package_writes(type_: Type, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if type_ in LARGE_BLOCKS else {}
    model = make_model("llama", num_hidden_layers=1, **sizes)
    stored = write_gguf(tmp_path / "model.gguf", model, matrix_type=type_)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        for name, weight in state(model).items():
            quantized = gguf.quants.quantize(weight, type_ if weight.ndim > 1 else Type.F32)
            info, ours = checkpoint.tensors()[name], checkpoint.read_stored(name)
            assert info.storage == (type_.name.lower() if weight.ndim > 1 else "f32")
            assert (info.nbytes, ours.tobytes()) == (quantized.nbytes, quantized.tobytes())
            read = checkpoint.read(name)
            assert (read.shape, read.dtype) == (weight.shape, np.float32)
            np.testing.assert_array_equal(read, gguf.quants.dequantize(quantized, type_) if weight.ndim > 1 else weight)
    assert any("attn_q" in name for name in stored)


BLOCK_TYPES = [t for t in Type if t.name.startswith(("Q", "IQ", "TQ", "MXFP", "NVFP"))]


def can_dequantize(type_: Type) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
    except NotImplementedError:
        return False
    return True


def llama_with_matrix_of(type_: int, elements: int, nbytes: int) -> RawGguf:
    """The tiny llama with 256 hidden dimensions, whose K matrix of 4 rows has `type_` and random bytes."""
    file = tiny_llama()
    file.keys = [(k, t, 256 if k == "llama.embedding_length" else v) for k, t, v in file.keys]
    file.keys += [("llama.attention.key_length", raw.U32, 4), ("llama.attention.value_length", raw.U32, 4)]
    random = np.random.default_rng(3)
    for tensor in file.tensors:
        tensor.dims = tuple(256 if dim == 8 else dim for dim in tensor.dims)
        if tensor.name in ("blk.0.attn_q.weight", "blk.0.attn_output.weight"):
            tensor.dims = (256, 8) if "attn_q" in str(tensor.name) else (8, 256)
        tensor.data = bytes(4 * int(np.prod(tensor.dims)))
        if tensor.name == "blk.0.attn_k.weight":
            tensor.type = type_
            tensor.data = random.integers(0, 256, 4 * 256 // elements * nbytes, np.uint8).tobytes()
    return file


@pytest.mark.parametrize("type_", BLOCK_TYPES, ids=lambda type_: type_.name)
def test_every_block_type(type_: Type, tmp_path: Path) -> None:
    """Random bytes are blocks of every type; types that nobody dequantizes are refused by name."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[type_]
    file = llama_with_matrix_of(type_, elements, nbytes)
    data = next(t.data for t in file.tensors if t.name == "blk.0.attn_k.weight")
    (tmp_path / "model.gguf").write_bytes(file.pack())
    if not can_dequantize(type_):
        with pytest.raises(UnsupportedModel, match=rf"'blk.0.attn_k.weight' has type {type_.name}, which cannot be"):
            open_checkpoint(tmp_path / "model.gguf")
        return
    name = "model.layers.0.self_attn.k_proj.weight"
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    rows = np.frombuffer(data, np.uint8).reshape(4, -1)[[0, 2, 1, 3]]
    np.testing.assert_array_equal(checkpoint.read_stored(name), rows)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(checkpoint.read(name), gguf.quants.dequantize(rows, type_))


def open_with_keys(name: str, path: Path, add: Callable[[gguf.GGUFWriter], None], **options: Any) -> Checkpoint:
    write_gguf(path / "model.gguf", make_model(name, **options), extra_keys=add)
    return open_checkpoint(path / "model.gguf")


def keys(**scaling: Any) -> Callable[[gguf.GGUFWriter], None]:
    """Adds `llama.rope.scaling.*` keys; integers as u32, numbers as f32."""
    adders = {int: "add_uint32", float: "add_float32", str: "add_string"}

    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in scaling.items():
            getattr(writer, adders[type(value)])(f"llama.rope.scaling.{name}", value)

    return add


ROPES: dict[str, tuple[Callable[[gguf.GGUFWriter], None], RopeConfig]] = {
    "none": (keys(type="none"), RopeConfig()),
    "none, whatever the factor": (keys(type="none", factor=4.0), RopeConfig()),
    "linear": (keys(type="linear", factor=4.0), RopeConfig("linear", factor=4.0)),
    "linear of 1": (keys(type="linear", factor=1.0), RopeConfig()),
    "linear of 0": (keys(factor=0.0), RopeConfig()),
    "factor alone": (keys(factor=4.0), RopeConfig("linear", factor=4.0)),
    "old key": (lambda w: w.add_float32("llama.rope.scale_linear", 2.0), RopeConfig("linear", factor=2.0)),
    "yarn": (
        keys(type="yarn", factor=4.0, original_context_length=64),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "yarn without original length": (
        keys(type="yarn", factor=4.0),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=256),
    ),
    "yarn with betas": (
        keys(type="yarn", factor=4.0, original_context_length=64, yarn_beta_fast=16.0, yarn_beta_slow=2.0),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0),
    ),
    "yarn with its own factor": (
        keys(type="yarn", factor=4.0, original_context_length=64, attn_factor=0.5),
        RopeConfig(
            "yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.5 * (1 + 0.1 * np.log(4.0))
        ),
    ),
}


@pytest.mark.parametrize("case", ROPES)
def test_rope_scaling(case: str, tmp_path: Path) -> None:
    add, expected = ROPES[case]
    assert open_with_keys("llama", tmp_path, add).config.rope == expected


def test_llama3_scaling_comes_as_divisors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    write_gguf(tmp_path / "model.gguf", make_model("llama"), extra_tensors={"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.config.rope == RopeConfig(freq_factors=tuple(factors.tolist()))
    assert "rope_freqs.weight" not in checkpoint.tensors()


def test_partial_rotary_of_architectures_that_do_not_interleave(tmp_path: Path) -> None:
    add: Callable[[gguf.GGUFWriter], None] = lambda w: w.add_rope_dimension_count(16)  # noqa: E731
    assert open_with_keys("qwen3", tmp_path, add).config.rope == RopeConfig(rotary_dim=16)


GEMMA_SCALES = [
    ("gemma2", 2, 32**-0.5),
    ("gemma2", 46, 16**-0.5),
    ("gemma3", 2, 32**-0.5),
    ("gemma3", 62, 16**-0.5),
]


@pytest.mark.parametrize(("name", "layers", "scale"), GEMMA_SCALES)
def test_attention_scale_of_gemma_follows_the_size(name: str, layers: int, scale: float, tmp_path: Path) -> None:
    """head_dim is 32, hidden_size / heads is 16."""
    config = open_with_keys(name, tmp_path, lambda w: None, num_hidden_layers=layers).config
    assert config.query_scale == scale


GEMMA3_KEYS: dict[str, tuple[Callable[[gguf.GGUFWriter], None], tuple[int, ...], float | None]] = {
    "pattern of 6": (lambda w: None, (24, 24, 24, 24, 24, 0, 24), 1e4),
    "stated pattern": (
        lambda w: w.add_uint32("gemma3.attention.sliding_window_pattern", 3),
        (24, 24, 0, 24, 24, 0, 24),
        1e4,
    ),
    "listed layers": (
        lambda w: w.add_array("gemma3.attention.sliding_window_pattern", [True] * 6 + [False]),
        (24,) * 6 + (0,),
        1e4,
    ),
    "stated base": (lambda w: w.add_float32("gemma3.rope.freq_base_swa", 5e4), (24, 24, 24, 24, 24, 0, 24), 5e4),
}


@pytest.mark.parametrize("case", GEMMA3_KEYS)
def test_sliding_layers_of_gemma3(case: str, tmp_path: Path) -> None:
    add, windows, local_theta = GEMMA3_KEYS[case]
    config = open_with_keys("gemma3", tmp_path, add).config
    assert config.layer_windows == windows
    assert config.rope_local == RopeConfig(theta=local_theta or 0)


def test_end_of_turn_ids_end_a_sequence_too(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(2)

    assert open_with_keys("llama", tmp_path, add).config.eos_token_ids == (2, 7)


def test_smollm2_reads_as_the_gguf_package_does(smollm2_gguf: Path) -> None:
    """All tensors of a real file; un-permutation is checked by permuting back."""
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    with open_checkpoint(smollm2_gguf) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        assert checkpoint.config.rope == RopeConfig(theta=100_000.0)
        assert (checkpoint.config.num_heads, checkpoint.config.num_kv_heads) == (9, 3)
        assert len(checkpoint.tensors()) == len(theirs)
        for ours, name in zip(checkpoint.tensors(), theirs, strict=True):  # both in file order
            expected = theirs[name]
            stored = checkpoint.read_stored(ours)
            heads = 9 if "attn_q." in name else 3 if "attn_k." in name else 0
            if heads:
                stored = interleave_rows(stored, heads)
            assert stored.tobytes() == expected.data.tobytes()
            if name.startswith(("blk.0.", "output_norm")):
                values = gguf.quants.dequantize(expected.data, expected.tensor_type)
                read = checkpoint.read(ours)
                np.testing.assert_array_equal(interleave_rows(read, heads) if heads else read, values)


@pytest.mark.slow
def test_gemma3_reads_as_the_gguf_package_does(gemma3_gguf: Path) -> None:
    theirs = gguf.GGUFReader(gemma3_gguf).tensors
    with open_checkpoint(gemma3_gguf) as checkpoint:
        config = checkpoint.config
        assert (config.head_dim, config.num_kv_heads, config.query_scale) == (256, 1, 256**-0.5)
        assert config.layer_windows == (512, 512, 512, 512, 512, 0) * 3
        assert (config.rope.theta, config.rope_local and config.rope_local.theta) == (1e6, 1e4)
        for name, expected in zip(checkpoint.tensors(), theirs, strict=True):
            assert checkpoint.read_stored(name).tobytes() == expected.data.tobytes()
        np.testing.assert_array_equal(
            checkpoint.read("model.layers.0.mlp.down_proj.weight"),
            next(gguf.quants.dequantize(t.data, t.tensor_type) for t in theirs if t.name == "blk.0.ffn_down.weight"),
        )


def test_the_helper_writes_what_converters_write() -> None:
    """Q of the first head: pairs (i, i + 16) of transformers lie side by side in GGUF."""
    model = make_model("llama")
    ours, theirs = gguf_tensors(model)["blk.0.attn_q.weight"], state(model)["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(ours[:4], theirs[[0, 16, 1, 17]])
