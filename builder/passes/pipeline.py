"""The pass pipeline: what happens to a traced model, in order, by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from aotllm.builder.config import ModelConfig
from aotllm.builder.passes.arena_plan import ArenaLayout, plan_arena
from aotllm.builder.passes.fuse import fuse
from aotllm.builder.passes.kv_layout import kv_layout
from aotllm.builder.passes.shard import shard


@dataclass(frozen=True)
class PassReport:
    """What one pass did."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


def run_passes(
    model: ir.Model,
    config: ModelConfig,
    *,
    max_num_tokens: int,
    layout: ArenaLayout | None = None,
    tp: int = 1,
    on_pass: Callable[[PassReport], None] | None = None,
) -> list[PassReport]:
    """Fuses and plans a traced `model` in place; afterwards a target can lower it. It still runs in onnxruntime.

    Args:
        model: as `aotllm.builder.models.trace` made it.
        config: of the same checkpoint.
        max_num_tokens: tokens of a step, at most.
        layout: what the target wants of buffers.
        tp: ranks that the model is split over.
        on_pass: called after each pass.

    Returns:
        One report per pass, in order.

    Raises:
        UnsupportedModel: the model cannot be split over `tp` ranks.
        Internal: the model holds something that no pass knows.
    """
    passes: tuple[tuple[str, Callable[[], None]], ...] = (
        ("fuse", lambda: fuse(model, config.num_layers)),
        ("shard", lambda: shard(model, config, tp)),
        ("kv_layout", lambda: kv_layout(model)),
        ("arena_plan", lambda: plan_arena(model, max_num_tokens, layout)),
    )
    reports = []
    for name, run in passes:
        begin, nodes_before = time.perf_counter(), len(model.graph)
        run()
        reports.append(PassReport(name, time.perf_counter() - begin, nodes_before, len(model.graph)))
        if on_pass is not None:
            on_pass(reports[-1])
    return reports
