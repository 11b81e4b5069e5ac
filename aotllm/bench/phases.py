"""`Phases`: how fast a batch that begins together reads its prompts, and how fast it decodes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from aotllm.bench.load import LoadRun
from aotllm.bench.record import RequestRecord


@dataclass(frozen=True)
class Phases:
    """Rates of one run, all requests together."""

    prefill_throughput: float | None
    """Prompt tokens per second, those that the prefix cache had left out: from the start to the last request's first
    token. The first requests decode meanwhile, which it pays for. None where nothing was computed"""
    decode_throughput: float | None
    """Generated tokens per second while every request decodes: after the last one's first token, until the first one's
    last token. None where there is no such time: answers are too short for the time that the prompts take"""

    @classmethod
    def of(cls, run: LoadRun) -> Phases:
        """Of the requests that have succeeded; both rates are None unless all have."""
        done = [record for record in run.records if record.ok]
        if not done or len(done) < len(run.records) or run.interrupted:
            return cls(None, None)
        return cls(_prefill(done, run.started), _decode(done))


def _prefill(records: Sequence[RequestRecord], started: float) -> float | None:
    firsts = [record.first_token for record in records if record.first_token is not None]
    computed = sum((record.prompt_tokens or record.wanted_input) - (record.cached_tokens or 0) for record in records)
    if len(firsts) < len(records) or computed <= 0 or max(firsts) <= started:
        return None
    return computed / (max(firsts) - started)


def _decode(records: Sequence[RequestRecord]) -> float | None:
    if not all(len(record.chunk_tokens) for record in records):  # nobody has counted them
        return None
    begin = max(record.chunk_times[0] for record in records)
    end = min(record.chunk_times[-1] for record in records)
    if end <= begin:
        return None
    tokens = 0
    for record in records:
        first, last = bisect_right(record.chunk_times, begin), bisect_right(record.chunk_times, end)
        tokens += sum(record.chunk_tokens[first:last])
    return tokens / (end - begin)
