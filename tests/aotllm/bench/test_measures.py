"""The figures of a run against values computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aotllm.bench.goodput import is_good, parse_goodput
from aotllm.bench.measures import Measures
from aotllm.bench.record import RequestFailed, RequestRecord
from aotllm.bench.statistics import Distribution, percent_name
from aotllm.errors import InvalidRequest


def record(
    sent: float, chunks: Sequence[float], prompt: int = 10, cached: int | None = None, ended: float | None = None
) -> RequestRecord:
    """A request with a token at each of the given times."""
    made = RequestRecord(wanted_input=8, wanted_output=len(chunks), due=sent, sent=sent)
    for at in chunks:
        made.chunk(at, "x")
    made.finished = chunks[-1]
    made.usage(prompt, len(chunks), cached)
    made.ended = chunks[-1] if ended is None else ended
    return made


def failed(sent: float, ended: float, kind: str, chunks: Sequence[float] = ()) -> RequestRecord:
    made = RequestRecord(wanted_input=8, due=sent, sent=sent, ended=ended, error=RequestFailed(kind, "why"))
    for at in chunks:
        made.chunk(at, "x")
    return made


# Started at 100; ended at 104.
RECORDS = [
    record(100.0, [100.2, 100.4, 100.6], prompt=20, cached=10),  # ttft .2, tpot .2, e2el .6
    record(100.5, [101.5, 101.9], prompt=30, cached=0),  # ttft 1, tpot .4, e2el 1.4
    record(102.0, [102.6], prompt=50, cached=40, ended=104.0),  # ttft .6, no tpot, e2el 2
    failed(100.0, 100.1, "http_503"),
    failed(101.0, 103.0, "timeout", [101.6, 101.7]),
    failed(101.0, 101.1, "http_503"),
]


def measured(records: Sequence[RequestRecord] = RECORDS, objectives: dict[str, float] | None = None) -> Measures:
    return Measures.of(records, 100.0, 4.0, objectives, [50.0, 99.0])


def test_counts_and_rates():
    measures = measured()
    assert (measures.completed, measures.failed) == (3, 3)
    assert (measures.input_tokens, measures.output_tokens, measures.cached_tokens) == (100, 6, 50)
    assert measures.request_throughput == pytest.approx(3 / 4)
    assert measures.input_throughput == pytest.approx(100 / 4)
    assert measures.output_throughput == pytest.approx(6 / 4)
    assert measures.total_throughput == pytest.approx(106 / 4)
    assert measures.prefix_hit_rate == pytest.approx(50 / 100)
    assert dict(measures.error_counts) == {"http_503": 2, "timeout": 1}


def test_latencies_are_of_those_that_succeeded():
    latencies = measured().latencies
    assert {name: distribution.count for name, distribution in latencies.items()} == {
        "ttft": 3,
        "tpot": 2,
        "itl": 3,
        "e2el": 3,
    }
    ttft = latencies["ttft"]  # 0.2, 0.6, 1.0
    assert (ttft.mean, ttft.median) == (pytest.approx(0.6), pytest.approx(0.6))
    assert ttft.std == pytest.approx((2 * 0.4**2 / 3) ** 0.5)
    assert dict(ttft.percentiles)[99.0] == pytest.approx(0.6 + 0.4 * 0.98)  # rank 0.99 * 2 = 1.98
    assert latencies["tpot"].mean == pytest.approx(0.3)
    assert latencies["itl"].median == pytest.approx(0.2)  # 0.2, 0.2, 0.4
    assert latencies["e2el"].mean == pytest.approx((0.6 + 1.4 + 2.0) / 3)


def test_the_peak_is_of_tokens_in_one_second_of_the_run_those_of_failed_requests_too():
    # [100, 101): 3; [101, 102): 2 + 2 of the request that timed out; [102, 103): 1
    assert measured().max_output_tokens_per_s == 4
    assert measured([]).max_output_tokens_per_s == 0


def test_most_requests_at_one_moment():
    # At 101.0 … 101.1: those sent at 100.5, and two at 101.0.
    assert measured().max_concurrent_requests == 3
    back_to_back = [record(100.0, [101.0]), record(101.0, [102.0])]
    assert measured(back_to_back).max_concurrent_requests == 1


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ("ttft:1000", 3),
        ("ttft:999", 2),
        ("ttft:599", 1),
        ("tpot:399", 2),  # one has no time per output token, which is no failure to be fast
        ("e2el:1400", 2),
        ("ttft:600,tpot:100", 1),
        ("ttft:0", 0),
    ],
)
def test_goodput_counts_requests_within_all_objectives(objectives: str, good: int):
    # Differences of such times are not exact in binary; the objectives stand a little above them.
    limits = {name: value + 1e-9 for name, value in parse_goodput([objectives]).items()}
    assert measured(objectives=limits).goodput == pytest.approx(good / 4)


def test_no_objectives_no_goodput():
    assert measured().goodput is None


def test_an_answer_without_tokens_is_not_good_for_its_first_token():
    empty = RequestRecord(sent=1.0, ended=1.1)
    assert not is_good(empty, {"ttft": 10.0})
    assert is_good(empty, {"e2el": 10.0})


def test_goodput_is_parsed_as_vllm_writes_it():
    assert parse_goodput(["ttft:200", "tpot:50.5 e2el:1000"]) == {"ttft": 0.2, "tpot": 0.0505, "e2el": 1.0}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "ttft:fast", "ttft:nan", "itl:5", "ttft:1 ttft:2", ":3"])
def test_wrong_objectives_are_refused(text: str):
    with pytest.raises(InvalidRequest, match="NAME:MILLISECONDS"):
        parse_goodput([text])


def test_where_the_server_does_not_count_wanted_lengths_and_chunks_do():
    silent = RequestRecord(wanted_input=8, sent=1.0, ended=2.0)
    silent.chunk(1.5, "a")
    silent.chunk(1.6, "b")
    measures = Measures.of([silent], 1.0, 1.0)
    assert (measures.input_tokens, measures.output_tokens) == (8, 2)
    assert not measures.prompts_measured
    assert not measures.outputs_measured
    assert measures.prefix_hit_rate is None


def test_no_requests_at_all_are_zeros():
    measures = Measures.of([], 0.0, 0.0, {"ttft": 1.0})
    assert (measures.completed, measures.request_throughput, measures.max_concurrent_requests) == (0, 0.0, 0)
    assert measures.latencies["ttft"].p99 == 0.0


def test_lag_is_how_late_the_client_was():
    late = record(1.25, [2.0])
    late.due = 1.0
    assert Measures.of([late], 1.0, 1.0).client_lag.mean == pytest.approx(0.25)


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (25, 1.75), (50, 2.5), (75, 3.25), (99.9, 3.997), (100, 4.0)])
def test_percentiles_are_interpolated(percent: float, value: float):
    assert Distribution.of([4.0, 1.0, 3.0, 2.0], [percent]).percentiles == ((percent, pytest.approx(value)),)


def test_names_of_percentiles():
    assert [percent_name(p) for p in (50.0, 99.0, 99.9, 99.99)] == ["p50", "p99", "p99.9", "p99.99"]
