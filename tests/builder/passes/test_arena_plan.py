"""Buffers of whole models. That a plan computes the right thing in its arena is proven in targets/test_lowering.py."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from aotllm.builder.graph import ops
from aotllm.builder.models import registry, trace
from aotllm.builder.models.decoder import embed, head, mlp, self_attention
from aotllm.builder.passes import arena_plan, buffer_index, run_passes
from aotllm.builder.targets.cpu.lowering import lower
from tests.builder.fakes import (
    CONFIGS,
    TINY,
    UnreadableCheckpoint,
    random_checkpoint,
    random_tokens,
    run_graph,
)
from tests.builder.plan_interpreter import PlanInterpreter

MAX_NUM_TOKENS = 20


def planned(checkpoint):
    model = trace(checkpoint, 64)
    run_passes(model, checkpoint.config, max_num_tokens=MAX_NUM_TOKENS)
    return model


def overlapping(model):
    """Pairs of values that are alive at the same step and share bytes, by a walk over the steps."""
    plan, nodes = arena_plan(model), list(model.graph)
    ranges = {}
    last_use = defaultdict(int)
    for step, node in enumerate(nodes):
        for value in node.inputs:
            last_use[value] = step
        for value in node.outputs:
            if "buffer" in value.metadata_props:
                buffer = plan.buffers[buffer_index(value)]
                ranges[value] = (buffer.offset, buffer.offset + MAX_NUM_TOKENS * buffer.width * 4)
    pairs, alive = set(), set()
    for step, node in enumerate(nodes):
        alive |= {value for value in node.outputs if value in ranges}
        for a in alive:
            for b in alive:
                if a is not b and ranges[a][0] < ranges[b][1] and ranges[b][0] < ranges[a][1]:
                    pairs.add((a, b))
        alive = {value for value in alive if last_use[value] > step}
    return pairs


def is_in_place(a, b):
    """Whether one value is the residual that `linear_residual` replaces by the other."""
    return any(
        node is not None and node.op_type == "linear_residual" and other in node.inputs[1:2]
        for node, other in ((a.producer(), b), (b.producer(), a))
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_values_share_bytes_only_where_a_residual_is_overwritten(name):
    model = planned(UnreadableCheckpoint(CONFIGS[name]))
    pairs = overlapping(model)
    assert all(is_in_place(a, b) for a, b in pairs)
    residuals = sum(node.op_type == "linear_residual" for node in model.graph)
    assert residuals >= 3
    assert len(pairs) == 2 * residuals  # both ways


@pytest.mark.parametrize("name", CONFIGS)
def test_buffers_are_aligned_and_inside_the_arena(name):
    plan = arena_plan(planned(UnreadableCheckpoint(CONFIGS[name])))
    for buffer in plan.buffers:
        assert buffer.offset % 64 == 0
        assert buffer.offset + MAX_NUM_TOKENS * buffer.width * 4 <= plan.bytes
    assert plan.bytes % 64 == 0


def test_everything_but_logits_and_cache_has_a_buffer():
    model = planned(UnreadableCheckpoint(TINY))
    for node in model.graph:
        has_buffer = ["buffer" in value.metadata_props for value in node.outputs]
        assert has_buffer == {"norm_qkv_rope": [True, False, False], "lm_head": [False]}.get(node.op_type, [True])


def test_layers_reuse_the_same_few_buffers():
    plan = arena_plan(planned(UnreadableCheckpoint(TINY)))
    assert [(buffer.name, buffer.width) for buffer in plan.buffers] == [
        ("hidden", 48),
        ("query", 96),
        ("attention", 96),
        ("gated", 80),
    ]
    row = 4 * MAX_NUM_TOKENS
    assert plan.bytes == row * (48 + 96 + 96)  # the busiest step: the gated values fit where Q was


def test_a_residual_that_is_read_later_is_not_overwritten(monkeypatch):
    """A model whose feed-forward block is added to the layer's input: the sum with attention must not replace it."""

    def definition(d):
        x = embed(d)
        for layer in range(d.config.num_layers):
            prefix = f"model.layers.{layer}"
            attended = ops.add(x, self_attention(d, d.norm(x, f"{prefix}.input_layernorm"), layer))
            x = ops.add(x, mlp(d, d.norm(attended, f"{prefix}.post_attention_layernorm"), layer))
        return head(d, x)

    monkeypatch.setitem(registry._DEFINITIONS, "llama", definition)
    checkpoint, tokens = random_checkpoint(TINY), random_tokens(TINY, 18)
    model = planned(checkpoint)
    assert len(overlapping(model)) == 2 * 3  # only the second residual of a layer dies
    limits = {"max_seq_len": 64, "max_num_tokens": MAX_NUM_TOKENS, "max_batch_size": 1, "tokens_per_block": 32}
    lowered = lower(model, TINY, segment_format=lambda name: "f32", kv_dtype="f32", **limits)
    tensors = {job.tensor: checkpoint.read(job.source) for job in lowered.pack_jobs}
    tensors |= {job.tensor: job.compute() for job in lowered.dense_jobs}
    actual = PlanInterpreter(lowered.plan, tensors, num_blocks=1).step([tokens], [0], [[0]], ["all"])
    np.testing.assert_allclose(actual, run_graph(model, tokens), rtol=1e-4, atol=2e-5)
