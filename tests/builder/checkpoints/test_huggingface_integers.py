"""AWQ and GPTQ folders: values to the last bit, and what cannot be read is refused."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.checkpoints.int_models import KINDS, quantize_folder
from tests.builder.checkpoints.tiny_models import edit, make_model

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "vocab_size": 96}
DOWN = "model.layers.0.mlp.down_proj.weight"
STEM = DOWN.removesuffix(".weight")


@pytest.fixture
def folder(tmp_path):
    make_model("llama", torch.float16, **SIZES).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_format(kind, folder):
    original = load_file(folder / "model.safetensors")
    meant = quantize_folder(folder, KINDS[kind])
    with open_checkpoint(folder) as checkpoint:
        assert {n: i.shape for n, i in checkpoint.tensors().items()} == {n: tuple(t.shape) for n, t in original.items()}
        for name, values in meant.items():
            assert checkpoint.tensors()[name].storage == f"int{KINDS[kind].bits}"
            read = checkpoint.read(name)
            assert read.dtype == np.float32
            np.testing.assert_array_equal(read, values.numpy())
            np.testing.assert_allclose(read, original[name].float().numpy(), atol=0.2)
        assert checkpoint.tensors()["lm_head.weight"].storage == "f16"
        with pytest.raises(CheckpointError, match="'lm_head.weight' holds no integers"):
            checkpoint.integers("lm_head.weight", range(8))


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq, 8 bits"])
@pytest.mark.parametrize("rows", [range(0, 8), range(3, 30), range(255, 256), range(16, 256)])
def test_some_rows_are_rows_of_the_whole(kind, rows, folder):
    quantize_folder(folder, KINDS[kind])
    with open_checkpoint(folder) as checkpoint:
        part = checkpoint.integers(DOWN, rows)
        np.testing.assert_array_equal(part.values(), checkpoint.read(DOWN)[rows.start : rows.stop])
        np.testing.assert_array_equal(part.codes, checkpoint.read_stored(DOWN)[rows.start : rows.stop])


def test_scales_and_zeros_are_part_of_the_digest(folder):
    quantize_folder(folder, KINDS["awq"])
    with open_checkpoint(folder) as checkpoint:
        whole = checkpoint.integers(DOWN, range(256))
        data = whole.codes.tobytes() + whole.scales.tobytes() + whole.zeros.tobytes()
        assert checkpoint.tensor_digest(DOWN) == hashlib.sha256(data).hexdigest()


def test_a_zero_stored_as_all_ones_is_zero(folder):
    """Zeros less one wrap around, as the writers of v1 files do."""
    quantize_folder(folder, KINDS["gptq"])
    change(folder, lambda tensors: tensors[f"{STEM}.qzeros"].fill_(-1))
    with open_checkpoint(folder) as checkpoint:
        assert not checkpoint.integers(DOWN, range(256)).zeros.any()


def change(folder, edit_tensors):
    tensors = load_file(folder / "model.safetensors")
    edit_tensors(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("qzeros", None, f"matrix '{DOWN}' is quantized, but '{STEM}.qzeros' is missing"),
        ("scales", None, f"'{STEM}.scales' is missing"),
        ("qweight", None, f"'{DOWN}' is missing; llama"),
        ("qweight", torch.zeros(384, 31, dtype=torch.int32), r"'.*qzeros' has shape \[3, 32\]; expected \[3, 31\]"),
        ("qweight", torch.zeros(320, 32, dtype=torch.int32), r"has shape \[256, 320\]; its config asks for|expected"),
        ("qweight", torch.zeros(384, 32), r"'.*qweight' is F32 \[384, 32\]; expected 2 dimensions of I32"),
        ("qweight", torch.zeros(384, dtype=torch.int32), "expected 2 dimensions of I32"),
        ("qzeros", torch.zeros(4, 32, dtype=torch.int32), r"'.*qzeros' has shape \[4, 32\]; expected \[3, 32\]"),
        ("scales", torch.ones(3, 255, dtype=torch.float16), r"'.*scales' has shape \[3, 255\]; expected \[3, 256\]"),
        ("scales", torch.ones(3, 256, dtype=torch.int32), "expected 2 dimensions of F16 or BF16 or F32"),
        ("weight", torch.zeros(256, 384), "is there twice"),
    ],
)
def test_pieces_that_do_not_fit(part, tensor, message, folder):
    quantize_folder(folder, KINDS["awq"])
    name = f"{STEM}.{part}"
    change(folder, lambda tensors: tensors.pop(name) if tensor is None else tensors.update({name: tensor}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_scales_that_are_not_finite(folder):
    quantize_folder(folder, KINDS["gptq"])
    change(folder, lambda tensors: tensors[f"{STEM}.scales"][1].fill_(torch.inf))
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=f"'{STEM}.scales' holds a scale that is not finite"),
    ):
        checkpoint.read(DOWN)


def test_groups_out_of_order_are_refused(folder):
    quantize_folder(folder, KINDS["gptq"])
    change(folder, lambda tensors: tensors.update({f"{STEM}.g_idx": tensors[f"{STEM}.g_idx"].flip(0).contiguous()}))
    with pytest.raises(UnsupportedModel, match=r"'.*g_idx' assigns inputs to groups out of order .*desc_act: false"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("awq", {"bits": 3}, UnsupportedModel, "awq of 3 bits are not implemented; known: 4 bits"),
        ("awq", {"version": "gemv"}, UnsupportedModel, "AWQ of version 'gemv' .*known: version 'gemm'"),
        ("awq", {"zero_point": False}, UnsupportedModel, "AWQ without zero points"),
        ("awq", {"group_size": 48}, UnsupportedModel, "groups of 48 .*multiples of 32"),
        ("awq", {"bits": "four"}, CheckpointError, "quantization_config.bits' is 'four'"),
        ("awq", {"group_size": None}, CheckpointError, "quantization_config.group_size' is missing"),
        ("gptq", {"bits": 3}, UnsupportedModel, "gptq of 3 bits are not implemented; known: 4 or 8 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, UnsupportedModel, "GPTQ in the layout 'marlin'"),
        ("gptq", {"is_marlin_format": True}, UnsupportedModel, "GPTQ in the layout"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, UnsupportedModel, "settings of its own for some modules"),
        ("gptq", {"group_size": 0}, UnsupportedModel, "groups of 0"),
    ],
)
def test_variants_that_are_refused(kind, changes, error, message, folder):
    quantize_folder(folder, KINDS[kind])
    edit(folder, quantization_config={**KINDS[kind].config(), **changes})
    with pytest.raises(error, match=message):
        open_checkpoint(folder)


def test_the_layout_of_zeros_makes_a_difference(folder):
    """The same bits mean other weights in v1 and in v2."""
    quantize_folder(folder, KINDS["gptq"])
    with open_checkpoint(folder) as checkpoint:
        first = checkpoint.read(DOWN)
    edit(folder, quantization_config=dataclasses.replace(KINDS["gptq"], version="gptq_v2").config())
    with open_checkpoint(folder) as checkpoint:
        assert (checkpoint.read(DOWN) != first).any()
