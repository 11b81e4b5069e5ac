"""bfloat16 in integers, and what codes of E4M3 stand for, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotllm.builder.numerics import (
    bf16_bits,
    bf16_values,
    e4m3_values,
    stored_values,
)

NANS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF)


def test_every_code_has_torchs_value():
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), expected)


@pytest.mark.parametrize("bits", NANS)
def test_nan_stays_nan(bits):
    value = np.array([bits], np.uint32).view(np.float32)
    assert np.isnan(bf16_values(bf16_bits(value))).all()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_bf16_rounds_as_torch_does(values):
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bf16_bits(array), expected)


def test_strided_rows_are_converted_as_any():
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    bits = bf16_bits(values)
    np.testing.assert_array_equal(stored_values(bits[:, 2:5], "bf16"), values[:, 2:5])
