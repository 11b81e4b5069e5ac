"""`BuildOptions`: what a build may choose. Field docs are the help texts of `aotllm build`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from aotllm.engines.manifest import Quantization
from aotllm.errors import InvalidRequest, UnsupportedModel

TARGETS = ("cpu", "cuda", "tensorrt", "tensorrt-rtx")
IMPLEMENTED_TARGETS = ("cpu", "cuda")
DTYPES = ("auto", "f32", "f16", "bf16")
KV_CACHE_DTYPES = ("auto", "f32", "bf16", "int16", "int8", "fp8")
QUANTIZATIONS = ("fp8", "int8", "int4")
QUANTIZE_GROUPS = (32, 64, 128)
FP8_SCALES = ("search", "max")
SMS = (80, 89, 90)
FP8_SM = 89
"""First SM whose tensor cores multiply E4M3"""
FP8_CACHE_SM = 90
"""First SM whose attention of this version reads a cache of E4M3"""
_MOST = {
    "max_batch_size": 2**20,
    "max_num_tokens": 2**20,
    "max_seq_len": 2**24,
    "tokens_per_block": 1024,
    "tp": 64,
    "pp": 64,
}
"""Sizes that the runtime takes, at most"""


EXCLUDABLE = ("qkv", "o", "gate_up", "down")
_LAYER = re.compile(r"-?\d{1,5}")


@dataclass(frozen=True)
class Excluded:
    """What is not quantized."""

    layers: frozenset[int]
    matrices: frozenset[str]
    """Of EXCLUDABLE, in all layers"""


@dataclass(frozen=True)
class ShapeLimits:
    """The shape envelope of an engine, every field decided."""

    max_batch_size: int
    max_num_tokens: int
    tokens_per_block: int


_SHAPE_DEFAULTS = {"cpu": ShapeLimits(64, 512, 16), "cuda": ShapeLimits(256, 8192, 64)}
_TARGET_QUANTIZATIONS = {"cpu": ("int8", "int4"), "cuda": QUANTIZATIONS}
_TARGET_DTYPES = {"cpu": DTYPES, "cuda": ("auto", "bf16")}
_TARGET_KV_CACHE_DTYPES = {"cpu": ("auto", "f32", "bf16", "int16", "int8"), "cuda": ("auto", "bf16", "fp8")}


@dataclass(frozen=True)
class BuildOptions:
    """Options of one build."""

    target: str = "cpu"
    """Where the engine shall run: cpu or cuda"""
    sm: int | None = None
    """Compute capability of target cuda: 80, 89 or 90; default 90, which the kernels of this version are for. No such
    device is needed to build"""
    dtype: str = "auto"
    """Type of weights that the checkpoint stores as floats; auto = as stored on cpu, bf16 on cuda. Block-quantized
    weights stay so on cpu; on cuda they become bf16"""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache. cpu: f32, bf16, int16 or int8, auto = f32 for float32 engines, else int16, which is more
    exact and faster than bf16 in the same memory; cuda: bf16 or fp8, auto = bf16. int8 and fp8 take about half of the
    memory"""
    max_batch_size: int | None = None
    """Most sequences in one step; default: 64 on cpu, 256 on cuda"""
    max_seq_len: int | None = None
    """Longest sequence, prompt and answer, in tokens; default: the checkpoint's"""
    max_num_tokens: int | None = None
    """Most tokens in one step over all sequences; longer prompts run in chunks. Default: 512 on cpu, 8192 on cuda"""
    tokens_per_block: int | None = None
    """Tokens of a KV block. cpu: a multiple of 16, default 16; cuda: 16, 32, 64 or 128, default 64"""
    quantize: str | None = None
    """Quantize weights of the layers. cpu: int8 or int4, float or block-quantized weights that take more than that;
    embedding and output matrix get 8 bits. cuda: weights that are not in fp8, int8 or int4 already, to fp8 (E4M3, one
    scale per output channel), int8 (one scale per output channel) or int4, activations staying bf16 with the latter
    two"""
    quantize_group: int | None = None
    """Inputs that share a scale in int4. cpu: 32, 64 or 128, default 32: wider groups take less memory and cost
    accuracy; cuda: 128. int8 has groups of 32 on cpu, and none on cuda"""
    quantize_symmetric: bool = False
    """Leave out the least value of each group in int4 on cpu: half a bit less per weight in groups of 32, and less
    accurate. int8 is always so"""
    fp8_scales: str | None = None
    """How quantize fp8 finds the scale of a row: search, of sixteen within a factor of two the one with the least
    squared error, or max, that of the row's largest weight; default: search"""
    quantize_lm_head: bool = False
    """Quantize the output matrix like the layers (it is kept more exact otherwise); without effect where it is tied to
    the embedding"""
    quantize_exclude: str | None = None
    """What quantize leaves in bf16 on target cuda, with commas between: layers by number, from the end below 0, and
    matrices of all layers (qkv, o, gate_up, down). 0,-1 is the first and the last layer, where FP8 costs most"""
    tp: int = 1
    """Tensor-parallel ranks: each holds a part of every matrix. cuda: a GPU each; cpu: threads of one process, divided
    among them"""
    pp: int = 1
    """Pipeline-parallel stages: each is a run of layers, on tp ranks. They take turns in a step, which buys memory, not
    speed"""
    force: bool = False
    """Replace an engine that is already at the output path"""

    def shape_limits(self) -> ShapeLimits:
        """The sizes asked for, those left open by the target's defaults."""
        default = _SHAPE_DEFAULTS.get(self.target, _SHAPE_DEFAULTS["cpu"])
        return ShapeLimits(
            max_batch_size=self.max_batch_size if self.max_batch_size is not None else default.max_batch_size,
            max_num_tokens=self.max_num_tokens if self.max_num_tokens is not None else default.max_num_tokens,
            tokens_per_block=self.tokens_per_block if self.tokens_per_block is not None else default.tokens_per_block,
        )

    def quantization(self) -> Quantization | None:
        """What `quantize` and the fields beside it come to; None = weights stay as they are."""
        if self.quantize is None:
            return None
        if self.quantize == "int4":
            group = self.quantize_group or (128 if self.target == "cuda" else 32)
            return Quantization(method="int4", group=group, symmetric=self.quantize_symmetric)
        per_scale = 32 if self.quantize == "int8" and self.target == "cpu" else None
        return Quantization(method=self.quantize, group=per_scale, symmetric=True)

    def searches_fp8_scales(self) -> bool:
        """Whether scales of fp8 are searched, where the build makes some."""
        return self.fp8_scales != "max"

    def excluded(self, num_layers: int) -> Excluded:
        """What `quantize_exclude` says of a model of `num_layers` layers. Raises InvalidRequest for one it has not."""
        words = [] if self.quantize_exclude is None else self.quantize_exclude.replace(" ", "").split(",")
        numbers = [int(word) for word in words if _LAYER.fullmatch(word)]
        for number in numbers:
            if not -num_layers <= number < num_layers:
                raise InvalidRequest(
                    f"quantize_exclude: got layer {number}, but the model has {num_layers}, 0 to {num_layers - 1}",
                    "quantize_exclude",
                )
        return Excluded(
            frozenset(number % num_layers for number in numbers),
            frozenset(word for word in words if not _LAYER.fullmatch(word)),
        )

    def cuda_sm(self) -> int:
        """The compute capability that target cuda builds for."""
        return self.sm if self.sm is not None else 90

    def validate(self) -> None:
        """Raises InvalidRequest for a value out of range, UnsupportedModel for one that no code serves yet."""
        _one_of("target", self.target, TARGETS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantize is not None:
            _one_of("quantize", self.quantize, QUANTIZATIONS)
        if self.fp8_scales is not None:
            _one_of("fp8_scales", self.fp8_scales, FP8_SCALES)
        if self.quantize_group is not None and self.quantize_group not in QUANTIZE_GROUPS:
            raise InvalidRequest(
                f"quantize_group: got {self.quantize_group}, expected one of {', '.join(map(str, QUANTIZE_GROUPS))}",
                "quantize_group",
            )
        limits = self.shape_limits()
        for name in ("max_batch_size", "max_num_tokens", "tokens_per_block"):
            _bounded(name, getattr(limits, name))
        for name in ("tp", "pp"):
            _bounded(name, getattr(self, name))
        if self.max_seq_len is not None:
            _bounded("max_seq_len", self.max_seq_len)
        if limits.tokens_per_block % 16:
            raise InvalidRequest(
                f"tokens_per_block: got {limits.tokens_per_block}, expected a multiple of 16", "tokens_per_block"
            )
        if limits.max_num_tokens < limits.max_batch_size:
            raise InvalidRequest(
                f"max_num_tokens: got {limits.max_num_tokens}, expected at least max_batch_size "
                f"({limits.max_batch_size}): each running sequence takes one token per step",
                "max_num_tokens",
            )
        if self.target not in IMPLEMENTED_TARGETS:
            raise UnsupportedModel(
                f"target {self.target!r} is not implemented in this version; available: "
                f"{', '.join(IMPLEMENTED_TARGETS)}"
            )
        if self.quantize is not None:
            _one_of_target("quantize", self.quantize, _TARGET_QUANTIZATIONS, self.target)
        _one_of_target("dtype", self.dtype, _TARGET_DTYPES, self.target)
        _one_of_target("kv_cache_dtype", self.kv_cache_dtype, _TARGET_KV_CACHE_DTYPES, self.target)
        self._validate_quantization()
        if self.target == "cpu":
            self._validate_cpu()
        else:
            self._validate_cuda(limits)

    def _validate_cpu(self) -> None:
        if self.sm is not None:
            raise InvalidRequest(
                f"sm: got {self.sm}, but target cpu has no compute capability; give --target cuda", "sm"
            )

    def _validate_cuda(self, limits: ShapeLimits) -> None:
        if self.sm is not None and self.sm not in SMS:
            raise InvalidRequest(f"sm: got {self.sm}, expected one of {', '.join(map(str, SMS))}", "sm")
        if limits.tokens_per_block not in (16, 32, 64, 128):
            raise InvalidRequest(
                f"tokens_per_block: got {limits.tokens_per_block}, expected 16, 32, 64 or 128 on target cuda",
                "tokens_per_block",
            )
        for name, value, least in (
            ("quantize", self.quantize, FP8_SM),
            ("kv_cache_dtype", self.kv_cache_dtype, FP8_CACHE_SM),
        ):
            if value == "fp8" and self.cuda_sm() < least:
                raise InvalidRequest(f"{name}: got fp8, which needs sm {least} or newer; sm is {self.cuda_sm()}", name)

    def _validate_quantization(self) -> None:
        """What goes with `quantize` makes sense with it, and on the target."""
        if self.quantize_lm_head and self.quantize is None:
            raise InvalidRequest(
                "quantize_lm_head: got true without quantize; say to what, e.g. --quantize int8", "quantize_lm_head"
            )
        if self.fp8_scales is not None and self.quantize != "fp8":
            got = "without quantize" if self.quantize is None else f"with quantize {self.quantize}"
            raise InvalidRequest(
                f"fp8_scales: got {self.fp8_scales} {got}; expected with quantize fp8, on target cuda", "fp8_scales"
            )
        if self.quantize_group is not None and self.quantize != "int4":
            got = "without quantize" if self.quantize is None else f"with quantize {self.quantize}"
            raise InvalidRequest(
                f"quantize_group: got {self.quantize_group} {got}; only int4 has groups to choose: --quantize int4",
                "quantize_group",
            )
        if self.quantize_symmetric and self.quantize not in ("int8", "int4"):
            got = "without quantize" if self.quantize is None else f"with quantize {self.quantize}"
            raise InvalidRequest(
                f"quantize_symmetric: got true {got}; expected with int8 or int4", "quantize_symmetric"
            )
        if self.quantize_exclude is not None:
            self._validate_exclusion(self.quantize_exclude)
        if self.target == "cuda" and self.quantize == "int4":
            if self.quantize_group not in (None, 128):
                raise InvalidRequest(
                    f"quantize_group: got {self.quantize_group}, expected 128 on target cuda", "quantize_group"
                )
            if self.quantize_symmetric:
                raise InvalidRequest(
                    "quantize_symmetric: got true, but int4 of target cuda always has zero points; leave it out",
                    "quantize_symmetric",
                )

    def _validate_exclusion(self, text: str) -> None:
        if self.quantize is None or self.target != "cuda":
            got = "without quantize" if self.quantize is None else f"with target {self.target}"
            raise InvalidRequest(
                f"quantize_exclude: got {text} {got}; expected with quantize, on target cuda", "quantize_exclude"
            )
        for word in text.replace(" ", "").split(","):
            if word not in EXCLUDABLE and not _LAYER.fullmatch(word):
                raise InvalidRequest(
                    f"quantize_exclude: got {word!r}, expected numbers of layers and {', '.join(EXCLUDABLE)}, with "
                    "commas between, as in 0,-1,down",
                    "quantize_exclude",
                )

    def flags(self) -> tuple[str, ...]:
        """The command-line flags that say what differs from the defaults."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return tuple(_flag(name, value) for name, value in changed if name != "force" and value is not None)


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _one_of(name: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise InvalidRequest(f"{name}: got {got!r}, expected one of {', '.join(allowed)}", name)


def _one_of_target(name: str, got: str, allowed: Mapping[str, tuple[str, ...]], target: str) -> None:
    if got not in allowed[target]:
        others = "".join(f"; --target {other} takes {got}" for other in allowed if got in allowed[other])
        raise InvalidRequest(
            f"{name}: got {got!r}, expected one of {', '.join(allowed[target])} on target {target}{others}", name
        )


def _bounded(name: str, got: int) -> None:
    if not 0 < got <= _MOST[name]:
        raise InvalidRequest(f"{name}: got {got}, expected an integer from 1 to {_MOST[name]}", name)
