"""`Executor.stats`, `memory` and `kv_events`: the runtime's figures, typed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from aotllm import Executor, ExecutorStats
from tests.aotllm.fake_manager import FakeManager, says


def test_known_counters_are_fields_and_all_have_names(start: Callable[..., Executor]):
    stats = start(FakeManager(says("ok"))).stats()
    assert (stats.steps, stats.blocks_used, stats.kv_usage, stats.preemptions) == (3, 1, 0.25, 0)
    assert stats.counters == {"running": 0, "steps": 3, "blocks_used": 1, "blocks_total": 4, "spilled": 5}


def test_methods_of_the_runtime_are_no_counters():
    native = SimpleNamespace(steps=1, reset=lambda: None, _hidden=2)
    assert ExecutorStats.from_native(native) == ExecutorStats(steps=1, counters={"steps": 1})


def test_no_blocks_are_not_used():
    assert ExecutorStats().kv_usage == 0.0


def test_memory(start: Callable[..., Executor]):
    memory = start(FakeManager(says("ok"))).memory()
    assert (memory.tokens, memory.groups[0].num_bytes) == (640, 40 * 8192)
