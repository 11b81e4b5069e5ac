"""CUDA engines of FP8 checkpoints hold the checkpoint's own codes: they compute what its dequantized weights do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.models import trace
from aotllm.builder.options import BuildOptions
from aotllm.builder.targets.cpu.target import compile_cpu
from aotllm.builder.targets.cuda import target
from aotllm.builder.targets.cuda.target import compile_cuda
from aotllm.errors import InvalidRequest, UnsupportedModel
from tests.builder.checkpoints.fp8_models import KINDS, quantize_folder
from tests.builder.checkpoints.tiny_models import make_model
from tests.builder.fakes import random_tokens, run_graph
from tests.builder.targets.cuda.test_cuda_engine import LIMITS, engine

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 4 * 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 2,
}


ATOL = {"fp8": 1e-3, "fp8_block": 1e-3, "bf16": 0.05}
"""code · scale is rounded in bf16 only"""


@pytest.fixture
def folder(tmp_path):
    def save(kind, head=False, **sizes):
        model = make_model("llama", torch.bfloat16, **{**SIZES, **sizes})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(torch.randn(parameter.shape) * 1.5 / parameter.shape[1] ** 0.5)
        model.save_pretrained(tmp_path)
        quantize_folder(tmp_path, kind, head=head)
        return tmp_path

    return save


def check(folder, tmp_path, tp, atol=1e-3, **options):
    with open_checkpoint(folder) as checkpoint:
        tokens = random_tokens(checkpoint.config, 18)
        expected = run_graph(trace(checkpoint, LIMITS["max_seq_len"]), tokens)
        actual = engine(checkpoint, tmp_path, tp, **options).step([tokens], [0], [[2, 1]], ["all"])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.fixture(params=["bf16", "fp8_block"])
def gate_up_format(request, monkeypatch):
    """What the builder makes of a `gate_up` in blocks, and what the format allows."""
    monkeypatch.setattr(target, "BLOCK_GATE_UP_FORMAT", request.param)
    return request.param


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "per block"])
def test_engine_computes_with_the_checkpoints_weights(kind, tp, folder, tmp_path):
    check(folder(kind), tmp_path, tp)


@pytest.mark.parametrize("tp", [1, 4])
def test_engine_computes_with_the_checkpoints_blocks(tp, gate_up_format, folder, tmp_path):
    check(folder("per block"), tmp_path, tp, ATOL[gate_up_format])


def test_devices_without_fp8_get_its_values_in_bf16(folder, tmp_path):
    check(folder("per row"), tmp_path, 1, ATOL["bf16"], sm=80)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_at_ragged_ends(head, tp, gate_up_format, folder, tmp_path):
    """Neurons and tokens that are no multiple of a block, where they end the matrix."""
    check(
        folder("per block", head, intermediate_size=128 * tp * 2 + (0 if tp > 1 else 96)),
        tmp_path,
        tp,
        ATOL[gate_up_format],
    )


def test_formats(folder, gate_up_format):
    with open_checkpoint(folder("per block")) as checkpoint:
        compiled = compile_cuda(checkpoint, BuildOptions(target="cuda", quantize="fp8", **LIMITS))
        formats = {name: record["format"] for name, record in compiled.ranks[0].plan["linears"].items()}
        assert formats.pop("embedding") == formats.pop("lm_head") == "bf16"
        assert {fmt for name, fmt in formats.items() if name.endswith("gate_up")} == {gate_up_format}
        assert {fmt for name, fmt in formats.items() if not name.endswith("gate_up")} == {"fp8_block"}


@pytest.mark.parametrize(
    ("kind", "options", "stays"),
    [
        ("per block", {"quantize": "int4"}, "bf16, fp8_block"),
        ("per row", {"quantize": "int8"}, "bf16, fp8"),
        ("per row", {"quantize": "int4", "sm": 80}, "bf16"),
    ],
)
def test_quantizing_again_is_refused(kind, options, stays, folder):
    with (
        open_checkpoint(folder(kind)) as checkpoint,
        pytest.raises(InvalidRequest, match=f"quantize: got .*would be {stays}: .*leave --quantize out") as caught,
    ):
        compile_cuda(checkpoint, BuildOptions(target="cuda", **LIMITS, **options))
    assert caught.value.param == "quantize"


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_nothing_are_refused(kind, folder):
    """They are the checkpoint's; where its head is not in FP8 and shall be, that has some to find."""
    with open_checkpoint(folder(kind)) as checkpoint:
        for scales in ("search", "max"):
            options = BuildOptions(target="cuda", quantize="fp8", fp8_scales=scales, **LIMITS)
            with pytest.raises(
                InvalidRequest, match=f"fp8_scales: got {scales}, .* keep the scales they have"
            ) as caught:
                compile_cuda(checkpoint, options)
            assert caught.value.param == "fp8_scales"
            compile_cuda(checkpoint, replace(options, quantize_lm_head=True))


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"intermediate_size": 4 * 96}, {"tp": 4}, "does not end where a block of 128 x 128 weights does.*fewer ranks"),
        ({"head_dim": 64, "num_key_value_heads": 1}, {}, "layers.0.qkv: .*checkpoint in bf16, which --fp8"),
    ],
)
def test_blocks_that_would_be_torn_are_refused(sizes, options, message, folder):
    with (
        open_checkpoint(folder("per block", **sizes)) as checkpoint,
        pytest.raises(UnsupportedModel, match=message),
    ):
        compile_cuda(checkpoint, BuildOptions(target="cuda", **LIMITS, **options))


def test_the_cpu_target_refuses_fp8_checkpoints(folder):
    with (
        open_checkpoint(folder("per row")) as checkpoint,
        pytest.raises(UnsupportedModel, match="stored as 'fp8' cannot be packed for the cpu target"),
    ):
        compile_cpu(checkpoint, BuildOptions(max_seq_len=64))
