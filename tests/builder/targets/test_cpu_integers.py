"""AWQ and GPTQ folders on target cpu: the segments hold the checkpoint's weights to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.options import BuildOptions
from aotllm.builder.targets.cpu.packing import unpack_segment
from aotllm.builder.targets.cpu.target import compile_cpu
from aotllm.errors import UnsupportedModel
from tests.builder.checkpoints.int_models import KINDS, quantize_folder
from tests.builder.checkpoints.tiny_models import make_model

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "vocab_size": 96}


@pytest.fixture
def folder(tmp_path):
    make_model("llama", torch.float16, **SIZES).save_pretrained(tmp_path)
    return tmp_path


def segments(folder):
    """Engine's name of a matrix → its weights."""
    with open_checkpoint(folder) as checkpoint:
        program = compile_cpu(checkpoint, BuildOptions(max_seq_len=64)).ranks[0]
        jobs = {job.tensor: job for job in program.tensors}
        result = {}
        for linear in program.plan["linears"].values():
            for segment in linear["segments"]:
                packed = np.concatenate([part() for part in jobs[segment["tensor"]].parts])
                result[segment["tensor"]] = (
                    segment["format"],
                    unpack_segment(packed, segment["format"], segment["n"], linear["k"]),
                )
        return result


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gptq, 8 bits"])
def test_weights_are_the_checkpoints(kind, folder):
    meant = quantize_folder(folder, KINDS[kind])
    packed = segments(folder)
    for name, values in meant.items():
        fmt, got = packed[name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "").split("_proj")[0]]
        assert fmt == ("q4_0" if kind == "gptq, symmetric" else "q8_f32")
        np.testing.assert_array_equal(got, values.numpy())


def test_eight_bits_with_far_off_zeros_are_refused(folder):
    quantize_folder(folder, KINDS["gptq, 8 bits"])
    with open_checkpoint(folder) as checkpoint:
        name = "model.layers.0.mlp.down_proj.weight"
        integers = checkpoint.integers(name, range(256))
        integers.zeros[:] = 10
        integers.codes[0, 0] = 255
        from aotllm.builder.targets.cpu.packing import pack_integers

        with pytest.raises(UnsupportedModel, match=r"weights of -10 to 245 times their scale; target cpu holds -1"):
            pack_integers(integers, name, "q8_f32")
