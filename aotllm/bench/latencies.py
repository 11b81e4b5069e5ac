"""The latencies that are reported, by the names that benchmarks use."""

from __future__ import annotations

LATENCY_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
LATENCIES = tuple(LATENCY_NAMES)
