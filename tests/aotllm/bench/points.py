"""Points of a sweep, made of records at known times."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from aotllm.bench.arrivals import Arrivals
from aotllm.bench.load import LoadRun
from aotllm.bench.measures import Measures
from aotllm.bench.record import RequestFailed, RequestRecord
from aotllm.bench.result import BenchContext, BenchPoint

CONTEXT = BenchContext(
    backend="openai-chat",
    url="http://host",
    model="m<1>",
    workload="api",
    lengths_by="counted",
    tokenizer=None,
    seed=3,
    metrics=["ttft", "tpot", "itl", "e2el"],
    detailed=True,
)


def record(sent: float, ttft: float, tokens: int = 3) -> RequestRecord:
    """A token every tenth of a second after the first."""
    made = RequestRecord(wanted_input=4, wanted_output=tokens, due=sent, sent=sent)
    for index in range(tokens):
        made.chunk(sent + ttft + 0.1 * index, "x")
    made.finished = made.ended = made.chunk_times[-1]
    made.usage(5, tokens, 1)
    return made


FAILED = RequestRecord(
    wanted_input=4, due=10.5, sent=10.5, ended=11.0, error=RequestFailed("http_503", "HTTP 503: full")
)


def point(
    concurrency: int | None = 2,
    records: Sequence[RequestRecord] = (record(10.0, 0.5), FAILED, record(11.0, 0.25, tokens=1)),
    context: BenchContext = CONTEXT,
    arrivals: Arrivals | None = None,
    **fields: Any,
) -> BenchPoint:
    run = LoadRun(started=10.0, duration=2.0, records=list(records), conversations=3, **fields)
    measures = Measures.of(records, 10.0, 2.0, {"ttft": 0.3}, [50.0, 99.9])
    return BenchPoint(context, arrivals or Arrivals(), concurrency, run, measures, datetime(2026, 1, 2, 3, 4, 5))
