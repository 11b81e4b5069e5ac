"""`ExecutorStats`: the counters of a running engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ExecutorStats:
    """Counters since the engine was loaded, and the state after its latest step. Reading them costs next to nothing."""

    steps: int = 0
    """Steps that ran, each over all requests that had something to compute"""
    queued: int = 0
    """Sequences that wait now, preempted ones included"""
    running: int = 0
    """Sequences that hold KV blocks now"""
    finished: int = 0
    """Sequences that ended, for whatever reason"""
    context_tokens: int = 0
    """Prompt tokens that were computed, those computed again after a preemption included"""
    generated_tokens: int = 0
    """Tokens of answers"""
    blocks_total: int = 0
    """KV blocks of the device, in the first group of layers"""
    blocks_used: int = 0
    """Those that sequences hold now"""
    preemptions: int = 0
    """Times that a sequence gave its blocks up and was computed again later"""
    counters: dict[str, Any] = field(default_factory=dict)
    """All of the runtime's figures by name, those above included; which ones there are depends on the version"""

    @classmethod
    def from_native(cls, native: Any) -> ExecutorStats:
        """From `_runtime.Stats`."""
        counters = {
            name: value
            for name in sorted(dir(native))
            if not name.startswith("_") and not callable(value := getattr(native, name))
        }
        known = {f.name for f in dataclasses.fields(cls)} - {"counters"}
        return cls(**{name: counters[name] for name in known & counters.keys()}, counters=counters)

    @property
    def kv_usage(self) -> float:
        """Share of the device's KV blocks that sequences hold now, 0 … 1."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0
