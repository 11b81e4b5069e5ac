"""What ranks hold of a model. That they hold it together is proven in targets/cuda/test_cuda_engine.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aotllm.builder.models import trace
from aotllm.builder.passes import Partition, run_passes
from aotllm.errors import UnsupportedModel
from tests.builder.fakes import CONFIGS, TINY, UnreadableCheckpoint

EVEN = {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 80, "moe_intermediate_size": 40}
SPARSE = replace(CONFIGS["mixtral"], **EVEN)
MIXED = replace(CONFIGS["qwen3-moe"], **EVEN)


def test_every_rank_holds_a_part_of_every_expert():
    parts = [Partition(SPARSE, 4, rank).expert_neurons for rank in range(4)]
    assert parts == [range(0, 10), range(10, 20), range(20, 30), range(30, 40)]


@pytest.mark.parametrize(
    ("config", "obstacle"),
    [
        (replace(TINY, **{**EVEN, "intermediate_size": 81}), "81 neurons of an MLP"),
        (replace(MIXED, intermediate_size=81), "81 neurons of an MLP"),
        (replace(MIXED, moe_intermediate_size=41), "41 neurons of an expert"),
        (replace(SPARSE, moe_intermediate_size=41), "41 neurons of an expert"),
        (replace(SPARSE, num_heads=6), "6 query heads"),
    ],
)
def test_what_cannot_be_dealt_out_evenly_is_named(config, obstacle):
    with pytest.raises(UnsupportedModel, match=f"tp=4: {obstacle} cannot be dealt out evenly; .* --tp "):
        Partition(config, 4)


def test_sizes_that_no_layer_has_are_no_obstacle():
    """Dense MLPs of a model whose layers all have experts, and experts of one whose layers have none."""
    Partition(replace(SPARSE, intermediate_size=81), 4)
    Partition(replace(TINY, **{**EVEN, "moe_intermediate_size": 41}), 4)
    Partition(replace(MIXED, dense_layers=(0, 1, 2), moe_intermediate_size=41), 4)


def test_what_a_mixture_of_experts_makes_is_as_wide_on_a_rank():
    model = trace(UnreadableCheckpoint(MIXED), 64)
    run_passes(model, MIXED, max_num_tokens=8, tp=2)
    widths = {node.op_type: node.outputs[0].shape[-1] for node in model.graph}
    assert widths["norm_moe"] == MIXED.hidden_size
    assert widths["norm_swiglu"] == MIXED.intermediate_size // 2
