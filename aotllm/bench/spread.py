"""`Spread`: what the repeats of a measurement have given."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Samples in the order in which they were measured; at least one."""

    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[float | None]) -> Spread | None:
        """Of those that are there; None without any."""
        known = tuple(sample for sample in samples if sample is not None)
        return cls(known) if known else None

    @property
    def median(self) -> float:
        """Of two in the middle, their mean."""
        return statistics.median(self.samples)

    def text(self, digits: int = 1, factor: float = 1.0) -> str:
        """`12.3 (11.0–13.1)`; without extremes where there is one sample."""
        low, middle, high = (
            f"{value * factor:,.{digits}f}" for value in (min(self.samples), self.median, max(self.samples))
        )
        return middle if len(self.samples) == 1 else f"{middle} ({low}–{high})"

    def json(self) -> dict[str, Any]:
        """min, median, max and all samples."""
        return {
            "min": min(self.samples),
            "median": self.median,
            "max": max(self.samples),
            "samples": list(self.samples),
        }
