"""Integer weights of Hugging Face folders: AWQ and GPTQ.

A matrix `X.weight` [n, k] is stored as `X.qweight`, `X.qzeros` and `X.scales`, all of them transposed: int32 words of
8 codes of 4 bits (4 of 8 bits), the first code lowest.

* AWQ (version "gemm"): `qweight` [k, n / 8] and `qzeros` [groups, n / 8] hold 8 outputs a word, in the order
  0 2 4 6 1 3 5 7; `scales` [groups, n].
* GPTQ: `qweight` [k / 8, n] holds 8 inputs a word, `qzeros` [groups, n / 8] 8 outputs, both in order; `scales`
  [groups, n]; `g_idx` [k] says which group an input belongs to. Files of `checkpoint_format` "gptq" store zeros less
  one (an all-ones code is zero 0), those of "gptq_v2" the zeros themselves.

`w = scale · (code - zero)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.base import Integers
from aotllm.builder.checkpoints.fields import Fields
from aotllm.errors import CheckpointError, UnsupportedModel

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble of a word → which of its 8 outputs that is"""
_PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
_MINIMUM_GROUP: Final = 32

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class IntegerScheme:
    """What `quantization_config` says of the matrices."""

    method: str
    """awq | gptq"""
    bits: int
    """4 | 8"""
    group: int
    """Inputs that share scale and zero; -1 = all"""
    zero_offset: int
    """Added to stored zeros"""

    @property
    def per_word(self) -> int:
        """Codes of an int32."""
        return 32 // self.bits

    @property
    def storage(self) -> str:
        """As in `TensorInfo.storage`."""
        return f"int{self.bits}"


def read_scheme(quantization: Fields) -> IntegerScheme | None:
    """The scheme of AWQ's and GPTQ's configurations; None for any other method.

    Raises:
        UnsupportedModel: a variant that is not read.
        CheckpointError: a field that cannot be.
    """
    method = quantization.raw("quant_method")
    if method not in ("awq", "gptq"):
        return None
    bits = quantization.integer("bits")
    group = quantization.integer("group_size", minimum=-1)
    allowed_bits = (4,) if method == "awq" else (4, 8)
    if bits not in allowed_bits:
        raise _unsupported(quantization, f"{method} of {bits} bits", f"{' or '.join(map(str, allowed_bits))} bits")
    if group != -1 and (group < _MINIMUM_GROUP or group % _MINIMUM_GROUP):
        raise _unsupported(
            quantization, f"{method} in groups of {group}", f"multiples of {_MINIMUM_GROUP}, or -1 for whole rows"
        )
    if method == "awq":
        version = str(quantization.raw("version") or "gemm").lower()
        if version != "gemm":
            raise _unsupported(quantization, f"AWQ of version '{version[:40]}'", "version 'gemm'")
        if not quantization.boolean("zero_point", True):
            raise _unsupported(quantization, "AWQ without zero points", "zero_point: true")
        return IntegerScheme("awq", bits, group, 0)
    layout = quantization.raw("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or quantization.raw("is_marlin_format"):
        raise _unsupported(quantization, f"GPTQ in the layout '{str(layout)[:40]}'", "'gptq' or 'gptq_v2'")
    if quantization.raw("dynamic"):
        raise _unsupported(quantization, "GPTQ with settings of its own for some modules ('dynamic')", "one setting")
    return IntegerScheme("gptq", bits, group, 1 if layout == "gptq" else 0)


def _unsupported(quantization: Fields, got: str, known: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{quantization.source}: weights quantized by {got} are not implemented; known: {known}. Use another "
        "quantization of the model, or its f16 or bf16 checkpoint with --quantize"
    )


def is_integer_part(name: str) -> bool:
    """Whether a tensor is a piece of a matrix of integers."""
    return name.rpartition(".")[2] in _PARTS and "." in name


class IntegerMatrix:
    """One matrix: which tensors it is made of, their shapes checked.

    Args:
        name: canonical name of the weight, `….weight`.
        scheme: of the checkpoint.
        shapes: canonical name → dtype and shape of all tensors.
        source: file or folder, for messages.

    Raises:
        CheckpointError: a piece is missing or does not fit the others.
    """

    def __init__(
        self, name: str, scheme: IntegerScheme, shapes: Mapping[str, tuple[str, tuple[int, ...]]], source: str
    ) -> None:
        self.name = name
        self.scheme = scheme
        self._source = source
        self._found = shapes
        stem = name.removesuffix("weight")
        self.parts = {part: stem + part for part in _PARTS}
        if name in shapes:
            raise self._fail("is there twice, as it is and quantized")
        words = self._shape("qweight", ("I32",), 2)
        awq, per_word = scheme.method == "awq", scheme.per_word
        self.k = words[0] if awq else words[0] * per_word
        self.n = words[1] * per_word if awq else words[1]
        self.group = self.k if scheme.group == -1 else scheme.group
        groups = -(-self.k // self.group) if self.k else 0
        self._expect("qzeros", ("I32",), (groups, self.n // per_word))
        self._expect("scales", ("F16", "BF16", "F32"), (groups, self.n))
        self.has_order = not awq and self.parts["g_idx"] in shapes
        if self.has_order:
            self._expect("g_idx", ("I32",), (self.k,))
        if self.n % per_word:
            raise self._fail(f"has {self.n} rows, which do not fill words of {per_word} zeros")

    @property
    def shape(self) -> tuple[int, int]:
        """`[n, k]`."""
        return self.n, self.k

    def check_order(self, g_idx: Array) -> None:
        """Raises UnsupportedModel where inputs of a group do not stand together."""
        if not np.array_equal(g_idx, np.arange(self.k) // self.group):
            raise UnsupportedModel(
                f"{self._source}: '{self.parts['g_idx']}' assigns inputs to groups out of order (GPTQ with desc_act: "
                "true), which is not implemented. Use a checkpoint quantized with desc_act: false, an AWQ one, or the "
                "f16 or bf16 one with --quantize int4"
            )

    def rows(self, rows: range, read: Callable[[str], Array], with_codes: bool = True) -> Integers:
        """Consecutive rows, as `Checkpoint.integers` has them.

        `read` gives a tensor by canonical name: int32, or scales as float16 or float32. Raises CheckpointError.
        """
        bits, per_word = self.scheme.bits, self.scheme.per_word
        scales = np.ascontiguousarray(read(self.parts["scales"])[:, rows.start : rows.stop].T, np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{self._source}: tensor '{self.parts['scales']}' holds a scale that is not finite")
        words = range(rows.start // per_word, -(-rows.stop // per_word))  # of rows that lie side by side
        inside = slice(rows.start - words.start * per_word, rows.stop - words.start * per_word)
        order = AWQ_ORDER if self.scheme.method == "awq" else None
        zeros = _unpack(read(self.parts["qzeros"])[:, words.start : words.stop], bits, order)[:, inside]
        zeros = (zeros + np.uint8(self.scheme.zero_offset)) & np.uint8((1 << bits) - 1)
        qweight = read(self.parts["qweight"])
        if not with_codes:
            codes = np.zeros((len(rows), 0), np.uint8)
        elif order is not None:
            codes = _unpack(qweight[:, words.start : words.stop], bits, order)[:, inside].T
        else:
            codes = _unpack(np.ascontiguousarray(qweight[:, rows.start : rows.stop].T), bits, None)
        return Integers(np.ascontiguousarray(codes), scales, np.ascontiguousarray(zeros.T), self.group)

    def _shape(self, part: str, dtypes: tuple[str, ...], dimensions: int) -> tuple[int, ...]:
        name = self.parts[part]
        if name not in self._found:
            raise self._fail(f"is quantized, but '{name}' is missing")
        dtype, shape = self._found[name]
        if dtype not in dtypes or len(shape) != dimensions:
            raise CheckpointError(
                f"{self._source}: tensor '{name}' is {dtype} {list(shape)}; expected {dimensions} dimensions of "
                f"{' or '.join(dtypes)}"
            )
        return shape

    def _expect(self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        got = self._shape(part, dtypes, len(shape))
        if got != shape:
            raise CheckpointError(
                f"{self._source}: tensor '{self.parts[part]}' has shape {list(got)}; expected {list(shape)} for "
                f"[{self.n}, {self.k}] weights of {self.scheme.bits} bits in groups of {self.group}"
            )

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._source}: matrix '{self.name}' {reason}")


def _unpack(words: Array, bits: int, order: tuple[int, ...] | None) -> npt.NDArray[np.uint8]:
    """int32 `[rows, words]` → codes `[rows, words · codes per word]`."""
    data = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    count = words.shape[1] * 32 // bits
    if bits == 8:
        return data.reshape(len(words), count)
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(*words.shape, 8)
    if order is not None:
        codes = codes[..., np.argsort(order)]
    return codes.reshape(len(words), count)
