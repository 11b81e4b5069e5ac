"""Cutting a model into pipeline stages: nearly equal costs, one value between them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from aotllm.builder.models import trace
from aotllm.builder.passes import cut_stages, run_passes
from aotllm.builder.passes.stages import _even_cuts
from aotllm.builder.targets.lowering import weight_bytes
from aotllm.errors import UnsupportedModel
from tests.builder.fakes import CONFIGS, UnreadableCheckpoint


def weights(value):
    return weight_bytes(value, lambda _, n, k: n * k)


def stages_of(config, size):
    model = trace(UnreadableCheckpoint(config), 32)
    run_passes(model, config, max_num_tokens=16)
    return model, cut_stages(model, size, weights)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stages_are_runs_of_the_graph(name, size):
    model, stages = stages_of(CONFIGS[name], size)
    assert [node for stage in stages for node in stage.nodes] == list(model.graph)
    assert [layer for stage in stages for layer in stage.layers] == list(range(CONFIGS[name].num_layers))
    assert [(stage.index, stage.size) for stage in stages] == [(i, size) for i in range(size)]
    assert stages[0].entering is None
    assert stages[-1].leaving is None
    for before, after in itertools.pairwise(stages):
        assert before.leaving is after.entering is before.nodes[-1].outputs[0]
    for stage in stages:
        attended = [node.attributes["layer"].as_int() for node in stage.nodes if "layer" in node.attributes]
        assert attended == [layer for layer in stage.layers for _ in range(2)]


@pytest.mark.parametrize(
    ("layers", "vocab", "size", "counts"),
    [
        (8, 97, 2, [4, 4]),
        (8, 97, 3, [3, 3, 2]),
        (8, 1000, 2, [5, 3]),  # the head is as large as two layers
        (8, 1000, 4, [2, 2, 3, 1]),
        (4, 5000, 2, [3, 1]),
        (3, 97, 3, [1, 1, 1]),
    ],
)
def test_the_head_counts_as_layers_do(layers, vocab, size, counts):
    _, stages = stages_of(replace(CONFIGS["llama"], num_layers=layers, vocab_size=vocab), size)
    assert [len(stage.layers) for stage in stages] == counts


@pytest.mark.parametrize("costs", [[1], [5, 1, 1, 1, 5], [1, 2, 3, 4, 5, 6, 7], [3, 0, 0, 9, 2, 2], [4] * 9])
def test_no_other_cuts_are_more_even(costs):
    for size in range(1, len(costs) + 1):

        def unevenness(cuts):
            ends = [0, *cuts, len(costs)]
            return sum(sum(costs[a:b]) ** 2 for a, b in itertools.pairwise(ends))

        cuts = _even_cuts(costs, size)
        assert len(set(cuts)) == size - 1
        others = itertools.combinations(range(1, len(costs)), size - 1)
        assert unevenness(cuts) == min(map(unevenness, others))


def test_more_stages_than_layers():
    with pytest.raises(UnsupportedModel, match="pp=4: the model has 3 layers and each stage needs one; use --pp 3"):
        stages_of(CONFIGS["llama"], 4)
