"""FP8 folders: every kind of scales is read, what is not of a kind is refused."""

from __future__ import annotations

import copy
import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.checkpoints.fp8_models import BLOCKS, COMPRESSED, KINDS, quantize_folder
from tests.builder.checkpoints.tiny_models import edit, make_model

SIZES = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 1, "vocab_size": 96}
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path):
    make_model("llama", torch.bfloat16, **SIZES).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_codes_scales_and_values(kind, folder):
    original = load_file(folder / "model.safetensors")
    quantize_folder(folder, kind)
    stored = load_file(folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors()) == set(original)
        info = checkpoint.tensors()[DOWN]
        blocks = kind == "per block"
        assert (info.storage, info.shape) == ("fp8_block" if blocks else "fp8", (256, 320))
        np.testing.assert_array_equal(checkpoint.read_stored(DOWN), stored[DOWN].view(torch.uint8).numpy())
        assert checkpoint.scales(DOWN).shape == ((2, 3) if blocks else (256,))
        assert checkpoint.scales(DOWN).dtype == np.float32
        values, expected = checkpoint.read(DOWN), original[DOWN].float().numpy()
        assert np.linalg.norm(values - expected) < 0.04 * np.linalg.norm(expected)
        assert checkpoint.tensors()["lm_head.weight"].storage == "bf16"
        with pytest.raises(CheckpointError, match=r"'lm_head.weight' has no scales"):
            checkpoint.scales("lm_head.weight")


def test_scales_are_part_of_the_digest(folder):
    quantize_folder(folder, "per row")
    with open_checkpoint(folder) as checkpoint:
        data = checkpoint.read_stored(DOWN).tobytes() + checkpoint.scales(DOWN).tobytes()
        assert checkpoint.tensor_digest(DOWN) == hashlib.sha256(data).hexdigest()


def change(folder, edit_tensors):
    tensors = load_file(folder / "model.safetensors")
    edit_tensors(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, f"'{DOWN}' holds E4M3 codes, but '{DOWN}_scale' is missing"),
        (torch.ones(255), r"has shape \[255\]; expected one scale, \[256\] or \[256, 1\].*or \[2, 3\]"),
        (torch.ones(3, 2), r"has shape \[3, 2\]"),
        (torch.full((256,), torch.nan), f"'{DOWN}_scale' holds a scale that is negative or not finite"),
        (torch.full((256,), -1.0), "negative"),
        (torch.ones(256, dtype=torch.int32), "holds I32 values, expected F32 or BF16"),
    ],
)
def test_scales_that_cannot_be(scale, message, folder):
    quantize_folder(folder, "per row")
    name = f"{DOWN}_scale"
    change(folder, lambda tensors: tensors.pop(name) if scale is None else tensors.update({name: scale}))
    with pytest.raises(CheckpointError, match=message), open_checkpoint(folder) as checkpoint:
        checkpoint.scales(DOWN)


def compressed(**weights):
    config = copy.deepcopy(COMPRESSED)
    config["config_groups"]["group_0"]["weights"].update(weights)
    return config


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "aqlm"}, "quantized by aqlm .*FP8 one.*AWQ or GPTQ"),
        ({}, "quantized by an unnamed method"),
        ({**BLOCKS, "weight_block_size": [64, 64]}, r"fp8 in blocks of \[64, 64\]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"modelopt \(NVFP4\)"),
        (compressed(type="int"), r"compressed-tensors \(float-quantized\)"),
        (compressed(num_bits=4), "compressed-tensors"),
        (compressed(strategy="group"), "compressed-tensors"),
    ],
)
def test_other_quantizations_are_refused(quantization, message, folder):
    edit(folder, quantization_config=quantization)
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(folder)
