"""Prefill and decode told apart, from the times at which tokens came."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aotllm.bench.load import LoadRun
from aotllm.bench.phases import Phases
from aotllm.bench.record import RequestFailed, RequestRecord


def record(times: Sequence[float], tokens: Sequence[int] = (), prompt: int = 6, cached: int = 0) -> RequestRecord:
    made = RequestRecord(wanted_input=prompt, sent=10.0)
    total = 0
    for time, count in zip(times, tokens or [1] * len(times), strict=True):
        total += count
        made.chunk(time, "", total_tokens=total)
    made.usage(prompt, total, cached)
    made.finished = made.ended = times[-1] if times else 11.0
    return made


def of(*records: RequestRecord, interrupted: bool = False) -> Phases:
    return Phases.of(LoadRun(started=10.0, records=list(records), interrupted=interrupted))


@pytest.mark.parametrize(
    ("records", "prefill", "decode"),
    [
        # One request: 6 tokens in 2 s, then 3 tokens in 3 s.
        ([record([12, 13, 14, 15])], 3.0, 1.0),
        # The second one's prompt ends at 14: from there until 16, where the first one ends, each has 2 tokens.
        ([record([12, 13, 14, 15, 16]), record([14, 15, 16, 17, 18])], 12 / 4, 4 / 2),
        # Chunks of several tokens count as such, the first chunk's not at all.
        ([record([12, 14], [4, 3])], 3.0, 1.5),
        # What the cache had was not computed.
        ([record([12, 13], cached=4)], 1.0, 1.0),
        # All of it was there.
        ([record([12, 13], cached=6)], None, 1.0),
        # The first one has ended before the second one's first token: they never decode together.
        ([record([11, 12]), record([13, 14])], 12 / 3, None),
        # A single token each: nothing to measure.
        ([record([12]), record([12])], 12 / 2, None),
        ([], None, None),
    ],
)
def test_rates(records: list[RequestRecord], prefill: float | None, decode: float | None):
    assert of(*records) == Phases(prefill and pytest.approx(prefill), decode and pytest.approx(decode))


def test_a_batch_of_which_a_request_failed_or_was_cut_off_has_no_rates():
    failed = RequestRecord(wanted_input=6, ended=12.0, error=RequestFailed("internal", "no"))
    whole = record([12, 13, 14])
    assert of(whole, failed) == of(whole, interrupted=True) == Phases(None, None)
    assert of(whole) != Phases(None, None)
