"""Load shapes: when requests are due."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RampUp:
    """A rate that grows over the run."""

    start: float
    """Requests per second at the beginning, > 0"""
    end: float
    """At the end"""
    exponential: bool = False
    """By equal factors in equal times, else by equal steps"""

    def rate(self, progress: float) -> float:
        """Requests per second after that share of the run."""
        progress = min(max(progress, 0.0), 1.0)
        if self.exponential:
            return self.start * math.pow(self.end / self.start, progress)
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class Arrivals:
    """Gaps between arrivals follow a gamma distribution of mean 1 / rate."""

    rate: float = math.inf
    """Arrivals per second; inf = all at once"""
    burstiness: float = 1.0
    """Shape of the distribution: 1 = Poisson process, below = bursts, above = more even, inf = all gaps alike"""
    ramp_up: RampUp | None = None
    """In place of `rate`"""

    def due_times(self, seed: int, progress: Callable[[int, float], float] = lambda index, due: 0.0) -> Iterator[float]:
        """Seconds since the start at which each arrival is due, without end; the same for the same seed.

        Args:
            seed: of the gaps.
            progress: (number of the arrival, when the one before was due) → share of the run, for the ramp.
        """
        rng = random.Random(f"{seed}:arrivals")
        due, index = 0.0, 0
        while True:
            yield due
            index += 1
            rate = self.rate if self.ramp_up is None else self.ramp_up.rate(progress(index, due))
            due += self._gap(rate, rng)

    def _gap(self, rate: float, rng: random.Random) -> float:
        if math.isinf(rate):
            return 0.0
        if math.isinf(self.burstiness):
            return 1.0 / rate
        return rng.gammavariate(self.burstiness, 1.0 / (rate * self.burstiness))
