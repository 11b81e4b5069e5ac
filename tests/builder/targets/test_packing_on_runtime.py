"""Builder and kernels agree to the last bit on what packed bytes stand for, whatever the format."""

from __future__ import annotations

import numpy as np
import pytest

from aotllm.builder.targets.cpu.packing import (
    pack_quantized,
    pack_segment,
    segment_format,
    segment_nbytes,
    unpack_segment,
)
from aotllm.builder.targets.cpu.packing_blocks import GGUF_TYPES
from aotllm.builder.targets.cpu.packing_formats import BLOCK_FORMATS
from aotllm.errors import InvalidRequest
from tests.builder.targets.test_packing import ALL_TYPES, assert_same_bits, dequantize, stored_rows

runtime = pytest.importorskip("aotllm._runtime", reason="the compiled runtime is not built")


@pytest.mark.parametrize("storage", sorted(ALL_TYPES))
def test_kernels_read_the_weights_of_every_block_type(storage: str) -> None:
    """Random bytes, NaN and infinities included."""
    n, k = 37, 768
    stored = stored_rows(storage, n, k, seed=5)
    fmt = segment_format(storage)
    packed = pack_segment(stored, storage, n, k, fmt)
    got = runtime.dequantize_panels(fmt, n, k, packed)
    assert_same_bits(got, unpack_segment(packed, fmt, n, k))
    if storage in GGUF_TYPES:
        assert_same_bits(got, dequantize(stored, storage))


@pytest.mark.parametrize("fmt", [f for f in BLOCK_FORMATS if f.startswith(("q4_0", "q4_1", "q8_0"))])
@pytest.mark.parametrize("k", [32, 96, 288, 576])
def test_kernels_read_what_the_build_quantizes(fmt: str, k: int) -> None:
    values = np.random.default_rng(k).standard_normal((21, k)).astype(np.float32)
    packed = pack_quantized(values, "w", fmt)
    assert_same_bits(runtime.dequantize_panels(fmt, 21, k, packed), unpack_segment(packed, fmt, 21, k))


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_kernels_read_floats(fmt: str) -> None:
    values = np.random.default_rng(0).standard_normal((19, 45)).astype(np.float32)
    packed = pack_segment(values, "f32", 19, 45, fmt)
    assert_same_bits(runtime.dequantize_panels(fmt, 19, 45, packed), unpack_segment(packed, fmt, 19, 45))


def test_contradictions_are_refused() -> None:
    panels = np.zeros(segment_nbytes("q4_0", 16, 64), np.uint8)
    with pytest.raises(InvalidRequest, match='no segment is "q9"'):
        runtime.dequantize_panels("q9", 16, 64, panels)
    with pytest.raises(InvalidRequest, match='no segment is "q4_0" of 16 x 40'):
        runtime.dequantize_panels("q4_0", 16, 40, panels)
    with pytest.raises(InvalidRequest, match="panels: expected"):
        runtime.dequantize_panels("q4_0", 17, 64, panels)
