"""GGUF models: every architecture against the Hugging Face reader, block formats, splits, the real SmolLM2."""

from __future__ import annotations

import contextlib
import shutil
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
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.checkpoints import raw_gguf as raw
from tests.builder.checkpoints.raw_gguf import RawGguf, RawTensor, tiny_llama
from tests.builder.checkpoints.tiny_models import MODELS, gguf_tensors, interleave_rows, make_model, state, write_gguf


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
    if expected.architecture == "qwen2":
        expected = replace(expected, layer_windows=())
    assert replace(ours.config, name="") == expected


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


def edited(change: Callable[[RawGguf], Any]) -> RawGguf:
    file = tiny_llama()
    change(file)
    return file


def set_key(name: str, kind: int, content: Any) -> RawGguf:
    def change(file: RawGguf) -> None:
        file.keys = [key for key in file.keys if key[0] != name] + [(name, kind, content)]

    return edited(change)


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
        "'mamba9' is not implemented; known are llama, qwen2, qwen3, gemma2, gemma3",
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
    "experts": (set_key("llama.expert_count", raw.U32, 8), UnsupportedModel, "mixture-of-experts"),
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


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The llama model in parts, as the gguf package splits it."""
    folder = tmp_path_factory.mktemp("split")
    write_gguf(folder / "model.gguf", make_model("llama"), split_max_tensors=12)
    return sorted(folder.iterdir())


def test_split_models(split: list[Path]) -> None:
    assert [path.name for path in split] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in split:
        checkpoint = open_checkpoint(part)
        for name, weight in state(make_model("llama")).items():
            np.testing.assert_array_equal(checkpoint.read(name), weight)


BAD_SPLITS: dict[str, tuple[Callable[[list[Path]], Any], str]] = {
    "part missing": (lambda parts: parts[1].unlink(), "in 3 files, of which model-00002-of-00003.gguf is missing"),
    "two parts missing": (lambda parts: [p.unlink() for p in parts[1:]], "model-00002-of-00003.gguf and 1 more"),
    "parts swapped": (
        lambda parts: (
            (parts[1].rename(parts[1].with_name("x")), parts[2].rename(parts[1]))
            and shutil.copy(parts[1].with_name("x"), parts[2])
        ),
        "says that it is part 3 of 3, its name that it is part 2 of 3",
    ),
    "part damaged": (lambda parts: parts[2].write_bytes(b"GGUF"), "00003-of-00003.gguf: truncated"),
    "part of another model": (
        lambda parts: shutil.copy(parts[0].with_name("other.gguf"), parts[1]),
        "says that it is part 1 of 1, its name that it is part 2 of 3",
    ),
}


@pytest.mark.parametrize("case", BAD_SPLITS)
def test_bad_splits(case: str, split: list[Path], tmp_path: Path) -> None:
    damage, message = BAD_SPLITS[case]
    parts = [Path(shutil.copy(part, tmp_path)) for part in split]
    (tmp_path / "other.gguf").write_bytes(tiny_llama().pack())
    damage(parts)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(parts[0])


def test_parts_that_hold_fewer_tensors_than_the_model_has(tmp_path: Path) -> None:
    """Two parts of the right names and numbers, the second without a tensor that the model had when it was split."""
    file = tiny_llama()
    second = RawGguf([("split.no", raw.U16, 1), ("split.count", raw.U16, 2)], file.tensors[6:])
    file.keys += [("split.no", raw.U16, 0), ("split.count", raw.U16, 2), ("split.tensors.count", raw.I32, 12)]
    file.tensors = file.tensors[:6]
    for number, part in enumerate((file, second), start=1):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(part.pack())
    with pytest.raises(CheckpointError, match="the parts hold 11 tensors, but the model has 12"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    file = tiny_llama()
    second = RawGguf([("split.no", raw.U16, 1), ("split.count", raw.U16, 2)], file.tensors[-1:])
    file.keys += [("split.no", raw.U16, 0), ("split.count", raw.U16, 2)]
    for number, part in enumerate((file, second), start=1):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(part.pack())
    with pytest.raises(CheckpointError, match="00002.gguf: tensor 'output_norm.weight' is in an earlier part"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_a_part_under_another_name(split: list[Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(split[0], tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match="part 1 of 3, its name that it is part 1 of 1; give each its name back"):
        open_checkpoint(path)


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
