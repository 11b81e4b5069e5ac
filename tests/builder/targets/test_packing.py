"""Packed segments stand for exactly the checkpoint's weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotllm.builder.targets.cpu.packing import pack_segment, panel_bytes, segment_format, segment_nbytes, unpack_segment
from aotllm.builder.targets.cpu.packing_blocks import GGUF_TYPES
from aotllm.builder.targets.cpu.packing_formats import BLOCK_FORMATS
from aotllm.builder.targets.cpu.packing_reexpress import REEXPRESSED
from aotllm.errors import CheckpointError, UnsupportedModel

ALL_TYPES = {**GGUF_TYPES, **REEXPRESSED}


def stored_rows(storage: str, n: int, k: int, seed: int) -> np.ndarray:
    """Random bytes: every code, every scale, NaN and infinity included."""
    block_type = ALL_TYPES[storage]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, k // block_type.block * block_type.type_size), np.uint8)


def dequantize(stored: np.ndarray, storage: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(quants.dequantize(stored, gguf.GGMLQuantizationType[storage.upper()]), np.float32)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit, any NaN for NaN."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.parametrize("storage", GGUF_TYPES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(n=st.integers(1, 40), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_block_types_of_the_table_are_packed_bit_for_bit(storage: str, n: int, blocks: int, seed: int) -> None:
    k = blocks * GGUF_TYPES[storage].block
    stored = stored_rows(storage, n, k, seed)
    fmt = segment_format(storage)
    packed = pack_segment(stored, storage, n, k, fmt)
    assert packed.dtype == np.uint8
    assert packed.nbytes == segment_nbytes(fmt, n, k)
    assert_same_bits(unpack_segment(packed, fmt, n, k), dequantize(stored, storage))


@pytest.mark.parametrize("storage", sorted(REEXPRESSED))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(n=st.integers(1, 20), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_types_with_codebooks_are_reexpressed_exactly(storage: str, n: int, blocks: int, seed: int) -> None:
    k = blocks * REEXPRESSED[storage].block
    stored = stored_rows(storage, n, k, seed)
    expected = dequantize(stored, storage)
    got = unpack_segment(pack_segment(stored, storage, n, k, "q8_f32"), "q8_f32", n, k)
    finite = np.isfinite(expected.reshape(-1, 16)).all(axis=1)
    np.testing.assert_array_equal(got.reshape(-1, 16)[finite], expected.reshape(-1, 16)[finite])
    assert np.isnan(got.reshape(-1, 16)[~finite]).all()


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 20), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_other_values_are_rounded_to_a_127th_of_their_group(n: int, blocks: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((n, 32 * blocks)).astype(np.float32)
    got = unpack_segment(pack_segment(values, "f32", n, 32 * blocks, "q8_f32"), "q8_f32", n, 32 * blocks)
    bound = np.abs(values.reshape(-1, 16)).max(axis=1, keepdims=True) / 127 * 0.501
    assert (np.abs(got - values).reshape(-1, 16) <= bound).all()


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("storage", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 4), (17, 7), (33, 64)])
def test_float_storages_convert_half_to_even(storage: str, fmt: str, n: int, k: int) -> None:
    torch = pytest.importorskip("torch")
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    values = torch.from_numpy(np.random.default_rng(k).standard_normal((n, k)).astype(np.float32)).to(dtypes[storage])
    stored = values.view(torch.uint16).numpy() if storage == "bf16" else values.numpy()
    packed = pack_segment(stored, storage, n, k, fmt)
    assert_same_bits(unpack_segment(packed, fmt, n, k), values.float().to(dtypes[fmt]).float().numpy())


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_narrowing_keeps_special_values(fmt: str) -> None:
    values = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38]], np.float32)
    got = unpack_segment(pack_segment(values, "f32", 1, 6, fmt), fmt, 1, 6)
    assert_same_bits(got, np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, np.inf]], np.float32))


def test_block_types_can_be_widened_to_floats() -> None:
    stored = stored_rows("q6_k", 5, 256, 1)
    assert_same_bits(
        unpack_segment(pack_segment(stored, "q6_k", 5, 256, "f32"), "f32", 5, 256), dequantize(stored, "q6_k")
    )


def test_the_layout_is_the_documented_one() -> None:
    """One Q4_1 panel by hand: code k of row r is (r + k) mod 16."""
    n, k = 16, 32
    codes = (np.arange(n)[:, None] + np.arange(k)) % 16
    scales = np.stack([np.arange(n) + 1, -np.arange(n)], axis=1).astype(np.float16)
    stored = np.concatenate([scales.view(np.uint8), (codes[:, :16] | codes[:, 16:] << 4).astype(np.uint8)], axis=1)
    packed = pack_segment(np.ascontiguousarray(stored), "q4_1", n, k, "q4_1")
    for line, row, j in np.ndindex(4, 16, 4):
        low, high = codes[row, 8 * line + j], codes[row, 8 * line + 4 + j]
        assert packed[64 * line + 4 * row + j] == low | high << 4
    np.testing.assert_array_equal(packed[256:288].view(np.float16), scales[:, 0])
    np.testing.assert_array_equal(packed[288:320].view(np.float16), scales[:, 1])


@pytest.mark.parametrize("fmt", [*BLOCK_FORMATS, "f32", "f16", "bf16"])
def test_panels_are_whole_lines(fmt: str) -> None:
    for k in (256, 512, 768):
        assert panel_bytes(fmt, k) % 64 == 0


def test_rows_beyond_n_do_not_change_the_others() -> None:
    stored = stored_rows("q4_k", 32, 256, 3)
    whole = unpack_segment(pack_segment(stored, "q4_k", 32, 256, "q4_k"), "q4_k", 32, 256)
    part = unpack_segment(pack_segment(stored[:19], "q4_k", 19, 256, "q4_k"), "q4_k", 19, 256)
    assert_same_bits(part, np.ascontiguousarray(whole[:19]))


def test_large_tensors_are_packed_in_chunks() -> None:
    """More rows than one chunk holds, not a multiple of 16."""
    stored = stored_rows("q8_0", 4103, 512, 4)
    expected = dequantize(stored, "q8_0")
    assert_same_bits(unpack_segment(pack_segment(stored, "q8_0", 4103, 512, "q8_0"), "q8_0", 4103, 512), expected)


@pytest.mark.parametrize(
    ("storage", "dtype", "fmt"),
    [
        ("f32", "auto", "f32"),
        ("bf16", "f16", "f16"),
        ("q4_1", "auto", "q4_1"),
        ("q4_1", "f16", "q4_1"),
        ("iq4_xs", "auto", "iq4_nl"),
        ("iq2_xxs", "auto", "q8_f32"),
        ("tq1_0", "bf16", "q8_f32"),
    ],
)
def test_segment_format(storage: str, dtype: str, fmt: str) -> None:
    assert segment_format(storage, dtype) == fmt


def test_unknown_storage_and_dtype_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'q9_z' cannot be packed"):
        segment_format("q9_z")
    with pytest.raises(ValueError, match="f8"):
        segment_format("f32", "f8")


def test_contradictions_are_refused() -> None:
    stored = stored_rows("q4_0", 3, 64, 0)
    with pytest.raises(CheckpointError, match="contradicts itself"):
        pack_segment(stored, "q4_0", 4, 64, "q4_0")
    with pytest.raises(CheckpointError, match="contradicts itself"):
        pack_segment(stored[:, :-1], "q4_0", 3, 64, "q4_0")
    with pytest.raises(CheckpointError, match="multiple of 32"):
        pack_segment(np.zeros((3, 40), np.float32), "f32", 3, 40, "q8_f32")
    with pytest.raises(ValueError, match="cannot hold"):
        pack_segment(stored, "q4_0", 3, 64, "q4_1")
    with pytest.raises(ValueError, match="has 288 bytes|bytes, got"):
        unpack_segment(np.zeros(7, np.uint8), "q4_0", 3, 64)
