"""`ForeignLoad`: how busy others kept the CPUs while something was measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq, steal: /proc/stat's columns but the idle ones, and guests, which user has in it"""


def busy_seconds(stat: str, ticks_per_second: float) -> float:
    """Of all CPUs together since the start, from the text of /proc/stat."""
    columns = stat.split("\n", 1)[0].split()[1:]
    return sum(int(columns[index]) for index in _BUSY if index < len(columns)) / ticks_per_second


def own_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ForeignLoad:
    """Repeats measurements that others have disturbed.

    Args:
        limit: CPUs that others may keep busy on average, such as 0.1.
        attempts: of a measurement; the least disturbed one counts.
    """

    def __init__(self, limit: float, attempts: int = 3) -> None:
        self._limit, self._attempts = limit, attempts

    def measure(self, run: Callable[[], float]) -> tuple[float, float]:
        """What `run` returned, and how many CPUs others kept busy meanwhile. All that it started must have ended."""
        best = (0.0, float("inf"))
        for _ in range(self._attempts):
            before, seconds = self._others(), os.times().elapsed
            value = run()
            seconds = os.times().elapsed - seconds
            load = max(0.0, self._others() - before) / max(seconds, 1e-9)
            if load < best[1]:
                best = (value, load)
            if load <= self._limit:
                break
        return best

    def _others(self) -> float:
        stat = Path("/proc/stat").read_text(encoding="ascii")
        return busy_seconds(stat, os.sysconf("SC_CLK_TCK")) - own_seconds()
