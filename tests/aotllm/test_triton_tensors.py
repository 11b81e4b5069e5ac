"""Tensors on the wire: numpy and Triton's client are the oracle; hostile ones are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from aotllm.errors import InvalidRequest
from aotllm.serving.kserve.protocol.messages import message_class
from aotllm.triton_tensors.tensors import (
    BOOL,
    BYTES,
    FP32,
    INT32,
    INT64,
    UINT64,
    DataType,
    Tensor,
    checked_element,
    decode_contents,
    decode_json,
    decode_raw,
)

NUMPY: dict[DataType, Any] = {BOOL: np.bool_, INT32: np.int32, INT64: np.int64, UINT64: np.uint64, FP32: np.float32}
ALL = [*NUMPY, BYTES]
VALUES: dict[DataType, list[Any]] = {
    BOOL: [True, False, True],
    INT32: [0, -(2**31), 2**31 - 1],
    INT64: [1, -(2**63), 2**63 - 1],
    UINT64: [0, 1, 2**64 - 1],
    FP32: [0.5, -math.inf, 1e-20],
    BYTES: ["", "Grüße 🌊", "x"],
}


def raw_of(datatype: DataType, values: list[Any]) -> bytes:
    if datatype is BYTES:
        return bytes(serialize_byte_tensor(np.array([v.encode() for v in values], np.object_)).item())
    return np.array(values, NUMPY[datatype]).tobytes()


@pytest.mark.parametrize("datatype", ALL, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 1), (1, 1, 3)])
def test_raw_data_is_that_of_numpy_and_triton(datatype: DataType, shape: tuple[int, ...]):
    values = VALUES[datatype]
    decoded = decode_raw("t", datatype, shape, raw_of(datatype, values))
    assert decoded == (np.array(values, np.float32).tolist() if datatype is FP32 else values)
    encoded = Tensor("t", datatype, shape, values).to_bytes()
    if datatype is BYTES:
        assert [v.decode() for v in deserialize_bytes_tensor(encoded)] == values
    else:
        assert encoded == raw_of(datatype, values)


@pytest.mark.parametrize("datatype", ALL, ids=lambda d: d.name)
def test_typed_contents(datatype: DataType):
    contents = message_class("InferTensorContents")()
    values = [v.encode() if isinstance(v, str) else v for v in VALUES[datatype]]
    getattr(contents, datatype.contents).extend(values)
    assert decode_contents("t", datatype, [3], contents) == decode_raw(
        "t", datatype, [3], raw_of(datatype, VALUES[datatype])
    )
    with pytest.raises(InvalidRequest, match="4 elements, got 3"):
        decode_contents("t", datatype, [4], contents)


@pytest.mark.parametrize("datatype", [d for d in ALL if d is not FP32], ids=lambda d: d.name)
def test_json_data_is_flat_or_nested(datatype: DataType):
    values = VALUES[datatype]
    assert decode_json("t", datatype, [1, 3], values) == values
    assert decode_json("t", datatype, [1, 3], [values]) == values
    assert Tensor("t", datatype, (3,), values).to_json() == values


def test_json_has_neither_infinity_nor_nan():
    assert Tensor("t", FP32, (3,), [1.5, -math.inf, math.nan]).to_json() == [1.5, None, None]
    assert Tensor("t", FP32, (2,), np.array([1.5, -math.inf], np.float32)).to_json() == [1.5, None]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "message"),
    [
        (INT32, [1], b"\0\0\0", "has 4 bytes, got 3"),
        (INT32, [1], b"\0" * 5, "has 4 bytes, got 5"),
        (INT32, [], b"", "has 4 bytes, got 0"),
        (INT32, [-1], b"\0" * 4, "no integers ≥ 0"),
        (INT32, [2**63], b"\0" * 4, "bytes, got 4"),
        (INT32, [2**62, 2**62], b"\0" * 4, "bytes, got 4"),
        (INT32, [2**32, 2**32], b"", "bytes, got 0"),  # 0 where sizes are 64 bits wide
        (INT32, [0, 1], b"\0" * 4, "has 0 bytes, got 4"),
        (INT32, [1] * 9, b"\0" * 4, "at most 8 sizes"),
        (BYTES, [1], b"", "do not fit"),
        (BYTES, [1], b"\0\0\0", "do not fit"),
        (BYTES, [2**63], b"\0\0\0\0", "do not fit"),
        (BYTES, [1], b"\5\0\0\0ab", "said to be 5 bytes long, but 2 are left"),
        (BYTES, [1], b"\xff\xff\xff\xffab", "said to be 4294967295 bytes long"),
        (BYTES, [2], b"\4\0\0\0abcd", "ends inside of the length"),
        (BYTES, [1], b"\1\0\0\0ab", "1 bytes are left"),
        (BYTES, [0], b"a", "1 bytes are left"),
        (BYTES, [2**17 + 1], bytes(4 * (2**17 + 1)), "at most 131072 elements"),
        (BYTES, [1], b"\1\0\0\0\xff", "not valid UTF-8"),
        (BYTES, [1], b"\3\0\0\0\xed\xa0\x80", "not valid UTF-8"),  # half of a surrogate pair
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_raw_data_is_refused(datatype: DataType, shape: list[int], data: bytes, message: str):
    with pytest.raises(InvalidRequest, match=message) as refused:
        decode_raw("t", datatype, shape, data)
    assert refused.value.param == "t"


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        (INT32, 2**31),
        (INT32, True),
        (INT32, 1.0),
        (INT32, "1"),
        (INT32, None),
        (UINT64, -1),
        (UINT64, 2**64),
        (BOOL, 1),
        (FP32, False),
        (FP32, "x"),
        (BYTES, 1),
        (BYTES, None),
        (BYTES, "\ud800"),
        (BYTES, {}),
    ],
)
def test_an_element_of_a_wrong_type_is_refused(datatype: DataType, value: Any):
    with pytest.raises(InvalidRequest):
        checked_element("t", datatype, value)


SIZES = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**62, 2**63 - 1]))


@given(st.sampled_from(ALL), st.lists(SIZES, max_size=9), st.binary(max_size=64))
def test_any_bytes_are_elements_or_an_error(datatype: DataType, shape: list[int], data: bytes):
    try:
        values = decode_raw("t", datatype, shape, data)
    except InvalidRequest:
        return
    assert len(values) == math.prod(shape)
    assert all(isinstance(value, datatype.kind) for value in values)
    if datatype is not FP32:  # NaN has many forms
        assert Tensor("t", datatype, tuple(shape), values).to_bytes() == (
            bytes(map(bool, data)) if datatype is BOOL else data
        )


@given(st.lists(st.text(max_size=9), max_size=5))
def test_texts_survive(texts: list[str]):
    texts = [t.encode("utf-8", "replace").decode() for t in texts]
    raw = Tensor("t", BYTES, (len(texts),), texts).to_bytes()
    assert decode_raw("t", BYTES, [len(texts)], raw) == texts
