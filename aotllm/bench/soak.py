"""A long run under steady load: does anything drift?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from aotllm.bench.record import RequestRecord

WINDOW = 60.0


@dataclass(frozen=True)
class SoakWindow:
    """One minute. Latencies are seconds, of the requests that ended well in it; None where none did."""

    end: float
    """Seconds since the start"""
    completed: int
    failed: int
    output_throughput: float
    """Tokens per second, of the requests that ended"""
    median_ttft: float | None
    p99_ttft: float | None
    median_tpot: float | None
    median_e2el: float | None
    memory: int | None
    """Resident bytes of the server"""

    @classmethod
    def of(cls, records: Sequence[RequestRecord], start: float, end: float, memory: int | None) -> SoakWindow:
        """The window from `start` to `end`."""
        done = [record for record in records if record.ok]
        ttfts = [record.ttft for record in done if record.ttft is not None]
        return cls(
            end=end,
            completed=len(done),
            failed=len(records) - len(done),
            output_throughput=sum(r.num_output_tokens for r in done) / (end - start) if end > start else 0.0,
            median_ttft=_percentile(ttfts, 50),
            p99_ttft=_percentile(ttfts, 99),
            median_tpot=_percentile([record.tpot for record in done if record.tpot is not None], 50),
            median_e2el=_percentile([record.e2el for record in done if record.e2el is not None], 50),
            memory=memory,
        )

    def line(self) -> str:
        """For people, on one line."""
        parts = [
            f"{self.end / 60:5.1f} min",
            f"{self.completed:5d} done",
            f"{self.failed:4d} failed",
            f"{self.output_throughput:8.1f} tok/s",
            f"TTFT {_milliseconds(self.median_ttft)} (p99 {_milliseconds(self.p99_ttft)})",
            f"TPOT {_milliseconds(self.median_tpot)}",
            f"E2EL {_milliseconds(self.median_e2el)}",
        ]
        if self.memory is not None:
            parts.append(f"memory {self.memory / 2**20:.1f} MiB")
        return "  ".join(parts)


@dataclass(frozen=True)
class Drift:
    """How one figure moves over a run: a straight line by least squares through its windows."""

    first: float
    """The line's value at the first window"""
    last: float
    """At the last one"""
    per_hour: float

    @property
    def relative(self) -> float:
        """Change over the run, as a share of the first value; 0 where that is 0."""
        return (self.last - self.first) / self.first if self.first else 0.0


_FIGURES = ("median_ttft", "median_tpot", "median_e2el", "output_throughput", "failed", "memory")


def drifts_of(windows: Sequence[SoakWindow]) -> dict[str, Drift]:
    """By figure, of those that three windows or more have. The first minute, in which caches fill, is left out where
    three others remain."""
    if len(windows) > 3:
        windows = windows[1:]
    drifts = {}
    for name in _FIGURES:
        points = [(window.end, getattr(window, name)) for window in windows if getattr(window, name) is not None]
        if len(points) < 3:
            continue
        times, values = np.asarray(points, dtype=np.float64).T
        slope, start = np.polyfit(times - times[0], values, 1)
        drifts[name] = Drift(float(start), float(start + slope * (times[-1] - times[0])), float(slope * 3600))
    return drifts


class SoakMonitor:
    """Gathers the windows of a run while it goes on.

    Args:
        memory: resident bytes of the server, or None.
        tell: takes a line per window.
        clock: that of the run.
        window: seconds.
    """

    def __init__(
        self,
        memory: Callable[[], Awaitable[int | None]],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
        window: float = WINDOW,
    ) -> None:
        self.windows: list[SoakWindow] = []
        self._memory, self._tell, self._clock, self._window = memory, tell, clock, window
        self._records: list[RequestRecord] = []

    def add(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._records.append(record)

    async def run(self) -> None:
        """Until cancelled; the window under way then counts if it has at least half of its time."""
        started = begin = self._clock()
        try:
            while True:
                # By the start of the run, so that windows do not shift.
                due = started + self._window * (len(self.windows) + 1)
                await asyncio.sleep(max(0.0, due - self._clock()))
                begin = await self._close(started, begin)
        finally:
            if self._clock() - begin >= self._window / 2:
                await self._close(started, begin)

    async def _close(self, started: float, begin: float) -> float:
        memory = await self._memory()
        now = self._clock()
        records, self._records = self._records, []
        window = SoakWindow.of(records, begin - started, now - started, memory)
        self.windows.append(window)
        self._tell(window.line())
        return now

    def json(self) -> dict[str, Any]:
        """Windows and drifts."""
        drifts = {name: asdict(drift) | {"relative": drift.relative} for name, drift in drifts_of(self.windows).items()}
        return {"windows": [asdict(window) for window in self.windows], "drift": drifts}


def drift_lines(windows: Sequence[SoakWindow]) -> list[str]:
    """For people: one line per figure."""
    units = {"output_throughput": (1.0, "tok/s"), "failed": (1.0, "failed per minute"), "memory": (2**-20, "MiB")}
    lines = []
    for name, drift in drifts_of(windows).items():
        scale, unit = units.get(name, (1000.0, "ms"))
        first, last, per_hour = drift.first * scale, drift.last * scale, drift.per_hour * scale
        lines.append(f"{name}: {first:.2f} → {last:.2f} {unit} ({drift.relative:+.1%}; {per_hour:+.2f} per hour)")
    return lines or ["too short for a drift: three minutes are needed"]


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.1f} ms"
