"""Goodput: requests per second that keep all of their latency objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotllm.bench.record import RequestRecord
from aotllm.errors import InvalidRequest

OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """`["ttft:200 tpot:50"]` → `{"ttft": 0.2, "tpot": 0.05}`: milliseconds to seconds.

    Raises:
        InvalidRequest: not NAME:MILLISECONDS, an unknown name, a negative time, a name twice.
    """
    objectives: dict[str, float] = {}
    for part in " ".join(texts).replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            seconds = float(value) / 1000
        except ValueError:
            seconds = -1.0
        if name not in OBJECTIVES or not seconds >= 0 or name in objectives:
            allowed = ", ".join(OBJECTIVES)
            raise InvalidRequest(
                f"--goodput takes NAME:MILLISECONDS, each of {allowed} once, as in ttft:200 tpot:50; got {part!r}",
                "goodput",
            )
        objectives[name] = seconds
    return objectives


def is_good(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """It succeeded within every objective. A time per output token that an answer of one token does not have counts as
    0; an answer without any token has no time to first token and is not good where that is an objective."""
    if not record.ok:
        return False
    latencies = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2el}
    return all((value := latencies[name]) is not None and value <= most for name, most in objectives.items())
