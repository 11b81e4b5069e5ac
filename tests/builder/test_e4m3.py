"""E4M3: its definition in numpy against torch, the compiled routine against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aotllm.builder.numerics import E4M3_SCALE_FACTORS, bf16_bits, bf16_values, e4m3_values, quantize_e4m3
from aotllm.errors import InvalidRequest
from tests.builder.e4m3_definition import (
    e4m3_codes,
    e4m3_row_scales,
    e4m3_searched_scales,
    squared_errors,
)

NANS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF)
MIDDLES = np.array([(a + b) / 2 for a, b in zip(e4m3_values()[:126], e4m3_values()[1:127], strict=True)], np.float32)


def torch_e4m3(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def test_every_bfloat16_has_torchs_code():
    values = bf16_values(np.arange(1 << 16, dtype=np.uint16))
    inside = values[np.abs(values) <= 464]  # beyond, torch makes NaN
    np.testing.assert_array_equal(e4m3_codes(inside), torch_e4m3(inside))


@pytest.mark.parametrize("direction", [-np.inf, 0, np.inf])
def test_neighbours_of_every_middle_have_torchs_code(direction):
    """A float32 next to the middle of two codes differs from it in the bits that are cut off."""
    values = MIDDLES if direction == 0 else np.nextafter(MIDDLES, np.float32(direction))
    both = np.concatenate([values, -values])
    np.testing.assert_array_equal(e4m3_codes(both), torch_e4m3(both))


def test_random_float32_have_torchs_code():
    rng = np.random.default_rng()
    values = (rng.normal(size=1 << 18) * 2.0 ** rng.integers(-12, 8, 1 << 18)).astype(np.float32)
    values = values[np.abs(values) <= 464]
    np.testing.assert_array_equal(e4m3_codes(values), torch_e4m3(values))


@pytest.mark.parametrize(
    ("value", "code"),
    [(449, 0x7E), (464.1, 0x7E), (1e30, 0x7E), (np.inf, 0x7E), (-500, 0xFE), (-np.inf, 0xFE), (0.0, 0), (-0.0, 0x80)],
)
def test_what_is_too_large_saturates(value, code):
    assert e4m3_codes(np.array([value], np.float32)).tolist() == [code]


@pytest.mark.parametrize("bits", NANS)
def test_nan_stays_nan(bits):
    value = np.array([bits], np.uint32).view(np.float32)
    assert (e4m3_codes(value)[0] & 0x7F) == 0x7F


def test_row_scales():
    rows = np.array([[1, -448], [0.5, 0.25], [0, -0.0], [1e-45, 0], [np.nan, 1], [1, -np.inf]], np.float32)
    scales = e4m3_row_scales(rows)
    assert scales.dtype == np.float32
    np.testing.assert_array_equal(scales[:4], np.array([1, 0.5 / 448, 1, np.finfo(np.float32).tiny], np.float32))
    assert not np.isfinite(scales[4:]).any()


def assert_as_defined(rows: np.ndarray, values: np.ndarray, columns: slice | None = None) -> None:
    """`rows` are float32 `values` as they are stored."""
    columns = columns or slice(0, values.shape[1])
    for search, scales in ((False, e4m3_row_scales(values)), (True, e4m3_searched_scales(values))):
        codes, found = quantize_e4m3(rows, columns, search)
        np.testing.assert_array_equal(found, scales)
        np.testing.assert_array_equal(codes, e4m3_codes((values / scales[:, None])[:, columns]))


@pytest.mark.parametrize("k", [1, 15, 16, 17, 100, 576])
@pytest.mark.parametrize("storage", ["f32", "f16", "bf16"])
def test_random_rows(storage, k):
    """Of every magnitude that the storage has, and with the one or other value far above the rest."""
    rng = np.random.default_rng()
    magnitudes = {"f32": (-40, 36), "f16": (-7, 1), "bf16": (-40, 36)}[storage]
    values = rng.normal(size=(200, k)) * 10.0 ** np.linspace(*magnitudes, 200)[:, None]
    values[::5, 0] *= 10.0 ** rng.uniform(0, 2, 40)
    values[::7] *= rng.random((29, k)) < 0.5
    if storage == "f32":
        rows = stored = values.astype(np.float32)
    elif storage == "f16":
        rows, stored = values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    else:
        rows = bf16_bits(values.astype(np.float32))
        stored = bf16_values(rows)
    assert_as_defined(rows, stored)
    assert_as_defined(rows, stored, slice(k // 3, k - k // 4))


@pytest.mark.parametrize("storage", ["f32", "f16", "bf16"])
@given(st.data())
def test_any_row(storage, data):
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 40)))
    if storage == "bf16":
        bits = data.draw(arrays(np.uint16, shape))
        rows = np.where(np.isfinite(bf16_values(bits)), bits, bits & 0xBFFF).astype(np.uint16)
        return assert_as_defined(rows, bf16_values(rows))
    width = {"f32": 32, "f16": 16}[storage]
    finite = st.floats(width=width, allow_nan=False, allow_infinity=False)
    rows = data.draw(arrays(f"f{width // 8}", shape, elements=finite))
    return assert_as_defined(rows, rows.astype(np.float32))


@pytest.mark.parametrize("search", [False, True])
def test_extreme_rows(search):
    tiny, least, most = np.finfo(np.float32).tiny, np.float32(1e-45), np.finfo(np.float32).max
    rows = np.zeros((6, 40), np.float32)
    rows[1, 3], rows[1, 4] = -0.0, 0.0
    rows[2, ::2] = least
    rows[3] = tiny * np.arange(40)
    rows[4] = most
    rows[5, 1:] = 1e-3
    rows[5, 0] = 1e30
    assert_as_defined(rows, rows)
    codes, scales = quantize_e4m3(rows, slice(0, 40), search)
    assert scales[:2].tolist() == [1, 1]
    assert codes[1, 3] == 0x80
    assert np.isfinite(scales).all()
    assert (scales >= tiny).all()
    assert not codes[5, 1:].any()
    assert (codes & 0x7F != 0x7F).all()


@pytest.mark.parametrize("bits", [*NANS, 0x7F800000, 0xFF800000])
@pytest.mark.parametrize("place", [0, 17, 39])
@pytest.mark.parametrize("search", [False, True])
def test_rows_that_are_not_finite_have_no_finite_scale(bits, place, search):
    rows = np.random.default_rng().normal(size=(3, 40)).astype(np.float32)
    rows.view(np.uint32)[1, place] = bits
    codes, scales = quantize_e4m3(rows, slice(0, 40), search)
    assert np.isfinite(scales).tolist() == [True, False, True]
    expected = quantize_e4m3(rows[[0, 2]], slice(0, 40), search)
    np.testing.assert_array_equal(codes[[0, 2]], expected[0])


def test_a_searched_scale_has_the_least_error_of_all_candidates():
    """By float64 arithmetic: less than the maximum's by some per cent."""
    rows = np.random.default_rng(0).normal(size=(64, 576)).astype(np.float32)

    def error(codes, scales):
        return ((e4m3_values()[codes].astype(np.float64) * scales[:, None] - rows) ** 2).sum(axis=1)

    found = error(*quantize_e4m3(rows, slice(0, 576), search=True))
    base = e4m3_row_scales(rows)
    candidates = [error(e4m3_codes(rows / s[:, None]), s) for s in base * E4M3_SCALE_FACTORS[:, None]]
    np.testing.assert_allclose(found, np.min(candidates, axis=0), rtol=1e-5)
    assert found.sum() < 0.92 * candidates[0].sum()
    np.testing.assert_allclose(squared_errors(rows, base), candidates[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (np.zeros((2, 3), np.float64), (0, 3), "rows: expected float32, float16 or uint16"),
        (np.zeros((2, 3), np.uint8), (0, 3), "rows: expected float32"),
        (np.zeros(3, np.float32), (0, 3), "rows: expected a contiguous array of two dimensions"),
        (np.zeros((2, 3), np.float32), (0, 4), r"columns: got 0 to 4, expected some of \[0, 3\)"),
        (np.zeros((2, 3), np.float32), (2, 1), "columns: got 2 to 1"),
    ],
)
def test_what_the_routine_refuses(rows, columns, message):
    with pytest.raises(InvalidRequest, match=message):
        quantize_e4m3(rows, slice(*columns), search=True)
