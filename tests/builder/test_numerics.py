"""bfloat16 and E4M3 in integers, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotllm.builder.numerics import (
    bf16_bits,
    bf16_values,
    e4m3_codes,
    e4m3_row_scales,
    e4m3_values,
    stored_values,
)

MIDDLES = np.array([(a + b) / 2 for a, b in zip(e4m3_values()[:126], e4m3_values()[1:127], strict=True)], np.float32)


def torch_e4m3(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def test_every_code_has_torchs_value():
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), expected)


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


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF])
def test_nan_stays_nan(bits):
    value = np.array([bits], np.uint32).view(np.float32)
    assert (e4m3_codes(value)[0] & 0x7F) == 0x7F
    assert np.isnan(bf16_values(bf16_bits(value))).all()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_bf16_rounds_as_torch_does(values):
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bf16_bits(array), expected)


def test_row_scales():
    rows = np.array([[1, -448], [0.5, 0.25], [0, -0.0], [1e-45, 0], [np.nan, 1], [1, -np.inf]], np.float32)
    scales = e4m3_row_scales(rows)
    assert scales.dtype == np.float32
    np.testing.assert_array_equal(scales[:4], np.array([1, 0.5 / 448, 1, np.finfo(np.float32).tiny], np.float32))
    assert not np.isfinite(scales[4:]).any()


def test_strided_rows_are_converted_as_any():
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(e4m3_codes(values[:, 2:5]), e4m3_codes(values)[:, 2:5])
    bits = bf16_bits(values)
    np.testing.assert_array_equal(stored_values(bits[:, 2:5], "bf16"), values[:, 2:5])
