"""What a build may be asked for: defaults by target, refusals that say what, got and allowed, flags that rebuild."""

from __future__ import annotations

import pytest

from aotllm.builder.options import BuildOptions, Excluded, ShapeLimits
from aotllm.errors import InvalidRequest, UnsupportedModel


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, ShapeLimits(64, 512, 16)),
        ({"target": "cuda"}, ShapeLimits(256, 8192, 64)),
        ({"target": "cuda", "max_batch_size": 3, "tokens_per_block": 32}, ShapeLimits(3, 8192, 32)),
    ],
)
def test_defaults_follow_the_target(options, limits):
    BuildOptions(**options).validate()
    assert BuildOptions(**options).shape_limits() == limits


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "gpu"}, InvalidRequest, "target: got 'gpu', expected one of cpu, cuda"),
        ({"target": "tensorrt"}, UnsupportedModel, "'tensorrt' is not implemented .* cpu, cuda"),
        ({"sm": 90}, InvalidRequest, "sm: got 90, .*cuda"),
        ({"target": "cuda", "sm": 75}, InvalidRequest, "sm: got 75, expected one of 80, 89, 90"),
        ({"target": "cuda", "dtype": "f16"}, InvalidRequest, "dtype: got 'f16', expected one of auto, bf16 on .*cuda"),
        ({"target": "cuda", "kv_cache_dtype": "int8"}, InvalidRequest, "got 'int8', expected one of auto, bf16, fp8"),
        ({"kv_cache_dtype": "fp8"}, InvalidRequest, "got 'fp8', expected one of auto, f32, bf16, int16, int8 on .*cpu"),
        ({"target": "cuda", "sm": 80, "quantize": "fp8"}, InvalidRequest, "quantize: got fp8, .*sm 89"),
        ({"target": "cuda", "sm": 80, "kv_cache_dtype": "fp8"}, InvalidRequest, "kv_cache_dtype: got fp8, .*sm 90"),
        ({"target": "cuda", "sm": 89, "kv_cache_dtype": "fp8"}, InvalidRequest, "kv_cache_dtype: got fp8, .*sm 90"),
        ({"target": "cuda", "quantize": "fp4"}, InvalidRequest, "got 'fp4', expected one of fp8, int8, int4"),
        (
            {"quantize": "fp8"},
            InvalidRequest,
            "got 'fp8', expected one of int8, int4 .*; --target cuda takes fp8",
        ),
        ({"target": "cuda", "quantize_lm_head": True}, InvalidRequest, "quantize_lm_head: got true"),
        ({"quantize_lm_head": True}, InvalidRequest, "quantize_lm_head: got true without quantize"),
        *(
            ({"target": "cuda", "fp8_scales": "max"} | options, InvalidRequest, f"fp8_scales: got max {got}; .*fp8, on")
            for options, got in (
                ({}, "without quantize"),
                ({"quantize": "int8"}, "with quantize int8"),
                ({"target": "cpu"}, "without quantize"),
                ({"target": "cpu", "quantize": "int4"}, "with quantize int4"),
            )
        ),
        (
            {"target": "cuda", "quantize": "fp8", "fp8_scales": "mean"},
            InvalidRequest,
            "fp8_scales: got 'mean', expected one of search, max",
        ),
        ({"quantize": "int4", "quantize_group": 48}, InvalidRequest, "quantize_group: got 48, expected one of 32, 64"),
        ({"quantize_group": 32}, InvalidRequest, "quantize_group: got 32 without quantize; .*--quantize int4"),
        ({"quantize": "int8", "quantize_group": 64}, InvalidRequest, "quantize_group: got 64 with quantize int8"),
        ({"quantize_symmetric": True}, InvalidRequest, "quantize_symmetric: got true without quantize"),
        ({"target": "cuda", "quantize_exclude": "0"}, InvalidRequest, "quantize_exclude: got 0 without quantize"),
        ({"quantize": "int8", "quantize_exclude": "0"}, InvalidRequest, "quantize_exclude: got 0 with target cpu"),
        *(
            ({"target": "cuda", "quantize": "fp8", "quantize_exclude": text}, InvalidRequest, f"got '{word}', .* 0,-1,")
            for text, word in (("", ""), ("0,,1", ""), ("0,up", "up"), ("--1", "--1"), ("1.5", "1.5"))
        ),
        (
            {"target": "cuda", "quantize": "fp8", "quantize_symmetric": True},
            InvalidRequest,
            "quantize_symmetric: got true with quantize fp8; expected with int8 or int4",
        ),
        (
            {"target": "cuda", "quantize": "int4", "quantize_group": 64},
            InvalidRequest,
            "quantize_group: got 64, expected 128 on target cuda",
        ),
        (
            {"target": "cuda", "quantize": "int4", "quantize_symmetric": True},
            InvalidRequest,
            "quantize_symmetric: got true, but int4 of target cuda always has zero points",
        ),
        ({"target": "cuda", "tokens_per_block": 48}, InvalidRequest, "got 48, expected 16, 32, 64 or 128"),
        (
            {"target": "cuda", "max_num_tokens": 255},
            InvalidRequest,
            r"got 255, expected at least max_batch_size \(256\)",
        ),
        ({"target": "cuda", "tp": 65}, InvalidRequest, "tp: got 65, expected an integer from 1 to 64"),
        ({"target": "cuda", "pp": 65}, InvalidRequest, "pp: got 65, expected an integer from 1 to 64"),
        ({"tp": 0}, InvalidRequest, "tp: got 0, expected an integer from 1 to 64"),
        ({"max_seq_len": 2**24 + 1}, InvalidRequest, "max_seq_len: got 16777217, expected .* from 1 to 16777216"),
        ({"max_num_tokens": 2**20 + 1}, InvalidRequest, "max_num_tokens: got 1048577, expected .* from 1 to 1048576"),
        ({"max_batch_size": 2**31}, InvalidRequest, "max_batch_size: got 2147483648, expected .* from 1 to 1048576"),
        ({"tokens_per_block": 1040}, InvalidRequest, "tokens_per_block: got 1040, expected .* from 1 to 1024"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        BuildOptions(**options).validate()


@pytest.mark.parametrize(
    ("options", "method", "group", "symmetric"),
    [
        ({"quantize": "int8"}, "int8", 32, True),
        ({"quantize": "int4"}, "int4", 32, False),
        ({"quantize": "int4", "quantize_group": 128, "quantize_symmetric": True}, "int4", 128, True),
        ({"target": "cuda", "quantize": "int4"}, "int4", 128, False),
        ({"target": "cuda", "quantize": "int8"}, "int8", None, True),
        ({"target": "cuda", "quantize": "fp8"}, "fp8", None, True),
    ],
)
def test_what_quantization_comes_to(options, method, group, symmetric):
    BuildOptions(**options).validate()
    quantization = BuildOptions(**options).quantization()
    assert (quantization.method, quantization.group, quantization.symmetric) == (method, group, symmetric)
    assert BuildOptions(target=options.get("target", "cpu")).quantization() is None


def test_what_is_excluded():
    def excluded(text, layers=4):
        options = BuildOptions(target="cuda", quantize="fp8", quantize_exclude=text)
        options.validate()
        found = options.excluded(layers)
        return set(found.layers), set(found.matrices)

    assert BuildOptions().excluded(4) == Excluded(frozenset(), frozenset())
    assert excluded("0,-1, down") == ({0, 3}, {"down"})
    assert excluded("-4,qkv,o,gate_up") == ({0}, {"qkv", "o", "gate_up"})
    for number in ("4", "-5"):
        with pytest.raises(InvalidRequest, match=f"quantize_exclude: got layer {number}, .* has 4, 0 to 3"):
            excluded(number)


def test_flags_build_the_engine_again():
    options = BuildOptions(target="cuda", quantize="fp8", quantize_lm_head=True, tp=8, sm=90, force=True)
    assert options.flags() == ("--target cuda", "--sm 90", "--quantize fp8", "--quantize-lm-head", "--tp 8")
    options = BuildOptions(quantize="int4", quantize_group=64, quantize_symmetric=True)
    assert options.flags() == ("--quantize int4", "--quantize-group 64", "--quantize-symmetric")


def test_scales_of_fp8_are_searched_unless_the_maximums_are_asked_for():
    for fp8_scales, searches in ((None, True), ("search", True), ("max", False)):
        options = BuildOptions(target="cuda", quantize="fp8", fp8_scales=fp8_scales)
        options.validate()
        assert options.searches_fp8_scales() is searches
        assert ("--fp8-scales max" in options.flags()) is not searches
