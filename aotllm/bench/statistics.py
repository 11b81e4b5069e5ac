"""`Distribution`: mean, median, deviation and percentiles of a latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """All in the unit of the samples; 0 where there are none."""

    count: int
    mean: float
    median: float
    std: float
    """Of the population"""
    percentiles: tuple[tuple[float, float], ...]
    """(percent, value), interpolated linearly between samples"""
    p99: float = 0.0
    """For curves, whatever percentiles were asked for"""

    @classmethod
    def of(cls, samples: Sequence[float], percents: Sequence[float]) -> Distribution:
        """Percents are 0 … 100."""
        if not len(samples):
            return cls(0, 0.0, 0.0, 0.0, tuple((percent, 0.0) for percent in percents))
        values = np.asarray(samples, dtype=np.float64)
        ranks: list[float] = np.percentile(values, percents).tolist() if percents else []
        return cls(
            len(values),
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            tuple(zip(percents, ranks, strict=True)),
            float(np.percentile(values, 99)),
        )


def percent_name(percent: float) -> str:
    """99.0 → `p99`, 99.9 → `p99.9`."""
    return f"p{percent:g}"
