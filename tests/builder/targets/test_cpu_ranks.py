"""Engines of target cpu in several ranks: together they hold the weights of the model, each where it is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aotllm.builder.checkpoints.base import TensorInfo
from aotllm.builder.options import BuildOptions
from aotllm.builder.targets.cpu.packing import column_step, pack_segment, stored_columns, unpack_segment
from aotllm.builder.targets.cpu.packing_blocks import GGUF_TYPES
from aotllm.builder.targets.cpu.target import compile_cpu
from aotllm.errors import UnsupportedModel
from tests.builder.fakes import CONFIGS, UnreadableCheckpoint, random_checkpoint

LIMITS = {"max_seq_len": 64, "max_num_tokens": 40, "max_batch_size": 4, "tokens_per_block": 16}
SIZES = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "hidden_size": 40, "intermediate_size": 72}


def compiled(checkpoint, tp):
    return compile_cpu(checkpoint, BuildOptions(tp=tp, **LIMITS)).ranks


def tensors_of(rank):
    """Tensors of a rank as floats, `[n, k]` or `[n]`."""
    made = {job.tensor: np.concatenate([part() for part in job.parts]) for job in rank.tensors}
    for linear in rank.plan["linears"].values():
        for segment in linear["segments"]:
            name = segment["tensor"]
            if made[name].dtype == np.uint8:
                made[name] = unpack_segment(made[name], segment["format"], segment["n"], linear["k"])
    return made


def axis_of(name):
    """The axis along which a tensor is cut; None = each rank has all of it."""
    kind = name.removesuffix(".bias").rsplit(".", 1)[-1]
    if kind in ("o", "down"):
        return None if name.endswith(".bias") else 1
    return 0 if kind in ("q", "k", "v", "qkv", "gate", "up", "embedding", "lm_head") else None


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["llama-all-biases", "qwen2", "gemma2"])
def test_ranks_hold_the_model_together(name, tp):
    checkpoint = random_checkpoint(replace(CONFIGS[name], **SIZES))
    (whole,) = (tensors_of(rank) for rank in compiled(checkpoint, 1))
    ranks = compiled(checkpoint, tp)
    parts = [tensors_of(rank) for rank in ranks]
    assert all(part.keys() == whole.keys() for part in parts)
    for tensor, expected in whole.items():
        axis = axis_of(tensor)
        if axis is None:
            assert all(np.array_equal(part[tensor], expected) for part in parts), tensor
        elif tensor.endswith("qkv.bias"):
            shares = [np.split(part[tensor], [64 // tp, (64 + 32) // tp]) for part in parts]
            np.testing.assert_array_equal(np.concatenate([s[i] for i in range(3) for s in shares]), expected)
        else:
            np.testing.assert_array_equal(np.concatenate([part[tensor] for part in parts], axis), expected)
    assert [rank.plan["tp"] for rank in ranks] == [{"size": tp, "rank": i} for i in range(tp)]
    first = [rank.plan["ops"][0]["vocab_begin"] for rank in ranks]
    assert first == [97 * i // tp for i in range(tp)]
    assert all(op["all_reduce"] for rank in ranks for op in rank.plan["ops"] if op["op"] == "linear_residual")


def test_kv_heads_are_copied_where_they_are_fewer_than_ranks():
    checkpoint = random_checkpoint(replace(CONFIGS["llama"], **{**SIZES, "num_kv_heads": 2}))
    parts = [tensors_of(rank) for rank in compiled(checkpoint, 4)]
    k = checkpoint.read("model.layers.1.self_attn.k_proj.weight")
    for rank, head in enumerate((0, 0, 1, 1)):
        np.testing.assert_array_equal(parts[rank]["layers.1.k"], k[8 * head : 8 * head + 8])


def test_a_plan_of_one_rank_says_nothing_of_ranks():
    (rank,) = compiled(random_checkpoint(CONFIGS["llama"]), 1)
    assert not {"tp", "pp"} & rank.plan.keys()
    assert not any({"vocab_begin", "all_reduce"} & op.keys() for op in rank.plan["ops"])


@pytest.mark.parametrize("storage", ["f32", "q4_1", "q8_0", "q4_k", "q6_k"])
def test_cut_columns_keep_their_values(storage):
    rng, n, k = np.random.default_rng(0), 20, 1024
    if storage == "f32":
        stored, fmt = rng.normal(size=(n, k)).astype(np.float32), "f32"
    else:
        kind = GGUF_TYPES[storage]
        stored, fmt = rng.integers(0, 64, (n, k // kind.block * kind.type_size), np.uint8), kind.fmt
    whole = unpack_segment(pack_segment(stored, storage, n, k, fmt), fmt, n, k)
    columns = range(256, 768)
    part = pack_segment(stored_columns(stored, storage, columns), storage, n, 512, fmt)
    np.testing.assert_array_equal(unpack_segment(part, fmt, n, 512), whole[:, 256:768])
    assert 256 % column_step(storage) == 0


class BlockCheckpoint(UnreadableCheckpoint):
    """Matrices in a block format, of which nothing is read."""

    def __init__(self, config, storage):
        super().__init__(config)
        self._storage = storage

    def tensors(self):
        return {
            name: TensorInfo(name, info.shape, self._storage if len(info.shape) > 1 else "f32", 0)
            for name, info in super().tensors().items()
        }

    def read(self, name):
        assert len(self.tensors()[name].shape) == 1, f"{name} was read"
        return np.zeros(self.tensors()[name].shape, np.float32)


@pytest.mark.parametrize(
    ("storage", "sizes", "message"),
    [
        (
            "q4_1",
            {"intermediate_size": 4 * 48},
            r"layers\.0\.mlp\.down_proj\.weight is stored as q4_1, in blocks of 32",
        ),
        ("q4_k", {"intermediate_size": 512}, "blocks of 256 columns; a rank's share of 128 of its 512 columns"),
        ("f32", {"num_heads": 6}, "tp=4: 6 query heads cannot be dealt out evenly; .*--tp 2"),
        ("f32", {"intermediate_size": 90}, "tp=4: 90 neurons .*--tp 2"),
        ("f32", {"num_heads": 24, "num_kv_heads": 6}, "tp=4: 6 KV heads .*--tp 3"),
        ("f32", {"vocab_size": 3}, "tp=4: 3 tokens are too few .*--tp 2"),
    ],
)
def test_what_cannot_be_split(storage, sizes, message):
    config = replace(CONFIGS["llama"], **{**SIZES, "head_dim": 128, "hidden_size": 256, **sizes})
    with pytest.raises(UnsupportedModel, match=message):
        compiled(BlockCheckpoint(config, storage), 4)
