"""`StatusHistory`: what the page draws: rates and rolling percentiles of the last minutes."""

from __future__ import annotations

from collections import deque
from typing import Any

from aotllm.serving.status_page.snapshot import Snapshot, bucket_increase, increase, quantile

MINUTES = 10
MIN_INTERVAL = 1.0
"""Seconds between two points at least, however many pages look"""
WINDOW = 60.0
"""Seconds that percentiles and the hit rate are of"""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class StatusHistory:
    """Each look at the page adds a point. Points of several front ends fit together by their times: each of them sees
    the figures of the whole server."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque()
        self._points: deque[dict[str, Any]] = deque()

    def due(self, now: float) -> bool:
        """Whether it is time for another snapshot."""
        return not self._snapshots or not 0 <= now - self._snapshots[-1].time < MIN_INTERVAL

    def add(self, snapshot: Snapshot) -> None:
        """The newest one. If the clock was set back, history starts again."""
        if self._snapshots and snapshot.time <= self._snapshots[-1].time:
            self._snapshots.clear()
            self._points.clear()
        self._snapshots.append(snapshot)
        self._points.append(self._point())
        oldest = snapshot.time - MINUTES * 60
        while self._points[0]["t"] < oldest:
            self._points.popleft()
        # One snapshot from before the window of the next point has to stay.
        while len(self._snapshots) > 2 and self._snapshots[1].time < snapshot.time - WINDOW:
            self._snapshots.popleft()

    def points(self, since: float) -> list[dict[str, Any]]:
        """Those later than `since`, seconds since 1970, in order."""
        return [point for point in self._points if point["t"] > since]

    def _point(self) -> dict[str, Any]:
        now = self._snapshots[-1]
        point: dict[str, Any] = {"t": round(now.time, 3), **now.gauges}
        total = now.gauges["kv_total"]
        point["kv_usage"] = now.gauges["kv_used"] / total if total else None
        previous = self._snapshots[-2] if len(self._snapshots) > 1 else None
        for name in ("prompt_tokens", "generation_tokens", "requests", "errors"):
            rate = None
            if previous is not None:
                rate = increase(now.counters[name], previous.counters[name]) / (now.time - previous.time)
            point[f"{name}_per_second"] = rate
        before = self._window_start(now.time)
        point["prefix_hit_rate"] = _hit_rate(now, before)
        for name, buckets in now.histograms.items():
            inside = bucket_increase(buckets, before.histograms.get(name, {})) if before is not None else {}
            point[name] = {label: quantile(q, inside) for label, q in QUANTILES.items()}
        return point

    def _window_start(self, now: float) -> Snapshot | None:
        """The newest snapshot that is at least a window old, or else the oldest."""
        earlier = [snapshot for snapshot in self._snapshots if snapshot.time < now]
        old = [snapshot for snapshot in earlier if snapshot.time <= now - WINDOW]
        if old:
            return old[-1]
        return earlier[0] if earlier else None


def _hit_rate(now: Snapshot, before: Snapshot | None) -> float | None:
    if before is None:
        return None
    queries = increase(now.counters["prefix_queries"], before.counters["prefix_queries"])
    hits = increase(now.counters["prefix_hits"], before.counters["prefix_hits"])
    return min(1.0, hits / queries) if queries else None
