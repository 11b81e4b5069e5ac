"""CUDA engines of integers: their layout, what quantization loses, and that checkpoints' own codes lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.checkpoints.base import Integers
from aotllm.builder.models import trace
from aotllm.builder.numerics import int4_groups, int8_rows
from aotllm.builder.options import BuildOptions
from aotllm.builder.targets.cuda.integers import common_group, cut, pack_codes, pack_groups, unpack_codes
from aotllm.builder.targets.cuda.matrix import Matrix, stacked
from aotllm.builder.targets.cuda.packing import pack_jobs
from aotllm.builder.targets.cuda.target import compile_cuda
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.checkpoints.int_models import KINDS, quantize_folder
from tests.builder.checkpoints.tiny_models import make_model
from tests.builder.fakes import random_tokens, run_graph
from tests.builder.targets.cuda.test_cuda_engine import LIMITS, engine
from tests.builder.targets.cuda.test_cuda_packing import StoredCheckpoint, run

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 4 * 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 2,
}


def place(fmt, row, column):
    """Byte and shift of a code in its block, as the documentation words it."""
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    step, lower, right, odd = column // 16, row // 8 % 2, column // 8 % 2, column % 2
    if fmt == "int4":
        nibble = 4 * odd + 2 * right + lower
        return step // 4 * 2048 + thread * 16 + step % 4 * 4 + nibble // 2, nibble % 2 * 4
    return step // 2 * 2048 + thread * 16 + step % 2 * 8 + lower * 4 + odd * 2 + right, 0


@pytest.mark.parametrize("fmt", ["int4", "int8"])
def test_every_code_is_where_the_kernel_looks_for_it(fmt):
    n, k = 100, 300
    codes = np.random.default_rng().integers(0, 16 if fmt == "int4" else 256, (n, k), np.uint8)
    packed = pack_codes(codes, fmt)
    block_bytes = 64 * 128 // (2 if fmt == "int4" else 1)
    assert packed.size == 2 * 3 * block_bytes
    for row in range(n):
        for column in range(k):
            byte, shift = place(fmt, row % 64, column % 128)
            found = packed[(row // 64 * 3 + column // 128) * block_bytes + byte] >> shift
            assert found & (15 if fmt == "int4" else 255) == codes[row, column]
    np.testing.assert_array_equal(unpack_codes(packed, fmt, n, k), codes)


def test_scales_stand_with_their_64_rows():
    values = np.random.default_rng().normal(size=(70, 3)).astype(np.float32)
    packed = pack_groups(values, 300, 128)
    assert packed.shape == (2, 3, 64)
    for row in range(70):
        np.testing.assert_array_equal(packed[row // 64, :, row % 64], values[row])
    assert not packed[1, :, 6:].any()


@pytest.mark.parametrize("group", [32, 64, 128, 999])
@pytest.mark.parametrize("columns", [range(0, 512), range(128, 256), range(64, 160), range(96, 512)])
def test_cutting_and_regrouping_change_no_value(group, columns):
    random = np.random.default_rng()
    count = -(-512 // group)
    whole = Integers(
        random.integers(0, 16, (5, 512), np.uint8),
        random.normal(size=(5, count)).astype(np.float32),
        random.integers(0, 16, (5, count), np.uint8),
        group,
    )
    own = common_group(group, 512, columns, (128, 32))
    assert own is not None
    k = len(columns) + 64
    part = Integers(*cut(whole, columns, k, own), own).values()
    np.testing.assert_array_equal(part[:, : len(columns)], whole.values()[:, columns.start : columns.stop])
    assert not part[:, len(columns) :].any()


def test_groups_that_begin_inside_one_of_the_source_are_none():
    assert common_group(128, 512, range(16, 512), (128, 32)) is None
    assert common_group(48, 512, range(0, 512), (128, 32)) is None


def test_int4_has_no_more_error_than_rounding_to_the_whole_range():
    values = np.random.default_rng().normal(size=(64, 300)).astype(np.float32) ** 3
    values[3] = 0
    values[4] = 7
    codes, scales, zeros = int4_groups(values)
    back = Integers(codes, scales, zeros, 128).values()
    assert codes.max() <= 15
    assert zeros.max() <= 15
    np.testing.assert_array_equal(back[3], 0)
    np.testing.assert_allclose(back[4], 7, rtol=1e-6)
    for group in range(3):
        part = values[:, 128 * group : 128 * group + 128]
        low, high = np.minimum(part.min(1), 0)[:, None], np.maximum(part.max(1), 0)[:, None]
        step = np.maximum((high - low) / 15, 1e-30)
        zero = np.rint(-low / step)
        plain = step * (np.clip(np.rint(part / step) + zero, 0, 15) - zero)
        mine = np.square(back[:, 128 * group : 128 * group + 128] - part).sum(1)
        assert (mine <= np.square(plain - part).sum(1) * 1.0001 + 1e-9).all()


def test_int8_rounds_to_the_127th_of_a_rows_largest():
    values = np.random.default_rng().normal(size=(16, 96)).astype(np.float32)
    values[5] = 0
    codes, scales = int8_rows(values)
    np.testing.assert_array_equal(scales[5], 1)
    largest = np.abs(values).max(1, keepdims=True)
    assert (np.abs(codes * scales[:, None] - values) <= largest / 127 * 0.5001).all()


@pytest.mark.parametrize("fmt", ["int4", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_have_no_scale_are_refused(fmt, bad):
    values = np.ones((64, 128), np.float32)
    values[2, 5] = bad
    matrix = Matrix(("w",), (64,), stacked([range(64)], (64,)), range(128), 128)
    with pytest.raises(CheckpointError, match="memory: tensor 'w' holds a value that is not finite"):
        run(pack_jobs(StoredCheckpoint("f32", w=values), "w", matrix, fmt, 128 if fmt == "int4" else None))


@pytest.fixture
def folder(tmp_path):
    def save(kind=None, head=False, name="llama", **sizes):
        model = make_model(name, torch.float16, **{**SIZES, **sizes})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape) * 1.5 / parameter.shape[-1] ** 0.5)
        model.save_pretrained(tmp_path)
        if kind is not None:
            quantize_folder(tmp_path, KINDS[kind], head=head)
        return tmp_path

    return save


def outputs(folder, tmp_path, tp, **options):
    """What the checkpoint's own weights give in onnxruntime, and what the engine does."""
    with open_checkpoint(folder) as checkpoint:
        tokens = random_tokens(checkpoint.config, 18)
        expected = run_graph(trace(checkpoint, LIMITS["max_seq_len"]), tokens)
        actual = engine(checkpoint, tmp_path, tp, **options).step([tokens], [0], [[2, 1]], ["all"])
    return expected, actual


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_engine_computes_with_the_checkpoints_weights(kind, tp, folder, tmp_path):
    """Embedding and head of the folder are f16, which bf16 rounds."""
    expected, actual = outputs(folder(kind), tmp_path, tp)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("kind", ["awq", "gptq, 8 bits"])
def test_widths_that_fill_no_block(kind, folder, tmp_path):
    group = KINDS[kind].group
    sizes = {
        "hidden_size": 3 * group,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 2 * group,
    }
    expected, actual = outputs(folder(kind, **sizes), tmp_path, 1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.02), ("int4", 0.25)])
def test_quantized_engine_is_near_the_model(quantize, error, tp, folder, tmp_path):
    expected, actual = outputs(folder(), tmp_path, tp, quantize=quantize)
    assert np.linalg.norm(actual - expected) < error * np.linalg.norm(expected)


def test_a_quantized_head_is_kept(folder, tmp_path):
    expected, actual = outputs(folder("gptq", head=True), tmp_path, 1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02)


MIXTURES = {
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 256},
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["awq", "gptq, groups of 32, v2", "gptq, 8 bits"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_keep_the_checkpoints_integers(name, kind, tp, folder, tmp_path):
    expected, actual = outputs(folder(kind, name=name, **MIXTURES[name]), tmp_path, tp)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.03), ("int4", 0.3)])
def test_experts_are_quantized(quantize, error, folder, tmp_path):
    expected, actual = outputs(folder(name="mixtral"), tmp_path, 1, quantize=quantize)
    assert np.linalg.norm(actual - expected) < error * np.linalg.norm(expected)


def test_experts_whose_blocks_would_cross_are_refused(folder):
    sizes = {"hidden_size": 288, "num_attention_heads": 2, "num_key_value_heads": 2}
    with pytest.raises(UnsupportedModel, match="integers and the model's width is 288; target cuda takes multiples of"):
        records(folder(name="mixtral", **sizes), quantize="int8")


def records(folder, **options):
    with open_checkpoint(folder) as checkpoint:
        return compile_cuda(checkpoint, BuildOptions(target="cuda", max_seq_len=64, **options)).ranks[0].plan


@pytest.mark.parametrize(
    ("kind", "fmt", "group"), [("awq", "int4", 128), ("awq, groups of 64", "int4", 32), ("gptq, 8 bits", "int8", 32)]
)
def test_records_of_the_plan(kind, fmt, group, folder):
    plan = records(folder(kind))
    record = plan["linears"]["layers.0.gate_up"]
    assert (record["format"], record["group"], record["zeros"]) == (fmt, group, "layers.0.gate_up.zeros")
    kernels = [tactic["kernel"] for tactic in plan["tactics"]["layers.0.gate_up"]]
    assert kernels[:4] == ["int.8", "int.16", "int.32", "int.64"]
    assert all(kernel.startswith("dequant.tile.") for kernel in kernels[4:])
    assert plan["linears"]["lm_head"]["format"] == "bf16"


def test_int8_has_a_scale_per_row_and_no_groups(folder):
    record = records(folder(), quantize="int8")["linears"]["layers.0.qkv"]
    assert record["format"] == "int8"
    assert "group" not in record
    assert "zeros" not in record


def test_ranks_that_would_cut_a_group_are_refused(folder):
    sizes = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 384}
    with pytest.raises(UnsupportedModel, match="begin inside a group of 128; .*Use fewer ranks"):
        records(folder("awq", **sizes), tp=8)
