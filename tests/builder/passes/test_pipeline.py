"""The passes in order: names, reports, and a model that runs after each of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from aotllm.builder.models import trace
from aotllm.builder.passes import run_passes
from tests.builder.fakes import CONFIGS, random_checkpoint, random_tokens, run_graph


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_runs_unchanged_after_every_pass(name):
    config = CONFIGS[name]
    model = trace(random_checkpoint(config), 64)
    tokens = random_tokens(config, 16)
    expected = run_graph(model, tokens)
    seen = []

    def check(report):
        seen.append(report.name)
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
        np.testing.assert_array_equal(run_graph(model, tokens), expected)

    reports = run_passes(model, config, max_num_tokens=16, on_pass=check)
    assert seen == ["fuse", "shard", "kv_layout", "arena_plan"] == [report.name for report in reports]


def test_reports_count_nodes():
    config = CONFIGS["llama"]
    model = trace(random_checkpoint(config), 64)
    before = len(model.graph)
    reports = run_passes(model, config, max_num_tokens=16)
    assert [(r.nodes_before, r.nodes_after) for r in reports] == [(before, 17), (17, 17), (17, 17), (17, 17)]
    assert all(r.seconds >= 0 for r in reports)
