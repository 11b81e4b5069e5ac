"""What is counted of one request while it runs, by a clock that the test sets."""

from __future__ import annotations

import itertools
import random

import pytest
from prometheus_client import CollectorRegistry, Histogram

from aotllm import SamplingParams
from aotllm.errors import Internal
from aotllm.request import Request, RequestOutput, SequenceOutput, Timings, TokenOutput
from aotllm.serving.call import Call
from aotllm.serving.telemetry.base import NoTelemetry
from aotllm.serving.telemetry.bulk_histogram import BulkHistogram
from aotllm.serving.telemetry.request_metrics import TOKEN_BUCKETS, RequestMetrics
from aotllm.serving.telemetry.request_record import RequestRecord
from aotllm.serving.telemetry.request_watch import RequestWatch

COMPLETIONS = "/v1/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(clock: Clock, metrics: RequestMetrics) -> RequestWatch:
    call = Call(COMPLETIONS, NoTelemetry(), model="m", arrival=clock.now)
    return RequestWatch(call, Request(prompt="a"), metrics.of("m"), [], clock)


def test_latencies_are_those_of_the_clock():
    clock, metrics = Clock(), RequestMetrics()
    watch = watched(clock, metrics)
    # Two sequences: outputs of each at their own times; the second token of the first one comes with a third.
    for now, index, tokens in ((0.3, 0, 1), (0.4, 1, 1), (0.5, 0, 2), (0.55, 1, 1), (0.9, 0, 1)):
        clock.now = now
        watch.on_output(TokenOutput("", (7,) * tokens, index=index))
    watch.on_output(TokenOutput("", (), finish_reason="cancelled"))
    watch.on_end(None, Internal("x"))
    value = metrics.registry.get_sample_value
    labels = {"model_name": "m", "engine": "0"}
    assert value("aotllm:time_to_first_token_seconds_sum", labels) == pytest.approx(0.3)
    assert value("aotllm:inter_token_latency_seconds_count", labels) == 3
    assert value("aotllm:inter_token_latency_seconds_sum", labels) == pytest.approx(0.2 + 0.15 + 0.4)
    assert value("aotllm:generation_tokens_total", labels) == 6


def test_tokens_of_a_long_answer_are_counted_while_it_runs():
    clock, metrics = Clock(), RequestMetrics()
    watch = watched(clock, metrics)
    labels = {"model_name": "m", "engine": "0"}
    counted = []
    for step in range(30):
        clock.now = step / 10
        watch.on_output(TokenOutput("x", (7,)))
        counted.append(metrics.registry.get_sample_value("aotllm:generation_tokens_total", labels))
    lags = [step + 1 - count for step, count in enumerate(counted) if count is not None]
    assert counted[0] == 1, "the first token at once"
    assert max(lags) <= 10, "at most a second's tokens wait"


def test_a_first_token_that_is_held_back_is_timed_where_it_was_made():
    # best_of chooses: both answers come whole at 3 s, though the first token was there 1 s after submission at 0.5 s.
    clock, metrics = Clock(), RequestMetrics()
    records: list[RequestRecord] = []
    sampling = SamplingParams(best_of=2)
    call = Call(COMPLETIONS, NoTelemetry(), model="m", arrival=0.0)
    watch = RequestWatch(call, Request(prompt="a", sampling=sampling), metrics.of("m"), [records.append], clock)
    clock.now = 3.0
    watch.on_output(TokenOutput("abc", (1, 2, 3), finish_reason="stop"))
    answer = SequenceOutput(0, "abc", (1, 2, 3), "stop", None, Timings(1.0, 2.5, 0.25))
    watch.on_end(RequestOutput(1, (1,), 0, (answer,), answer.timings, num_generated_tokens=5), None)
    value, labels = metrics.registry.get_sample_value, {"model_name": "m", "engine": "0"}
    assert value("aotllm:time_to_first_token_seconds_sum", labels) == pytest.approx(1.5)
    assert value("aotllm:time_to_first_token_seconds_count", labels) == 1
    assert value("aotllm:inter_token_latency_seconds_count", labels) == 0
    assert value("aotllm:generation_tokens_total", labels) == 5
    (record,) = records
    assert (record.prepare_seconds, record.queue_seconds, record.prefill_seconds) == (0.5, 0.25, 0.75)


def test_a_sink_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture):
    heard: list[RequestRecord] = []

    def broken(_: RequestRecord) -> None:
        raise OSError("disk full")

    call = Call(COMPLETIONS, NoTelemetry(), request_id="r-9", model="m")
    RequestWatch(call, Request(prompt="a"), RequestMetrics().of("m"), [broken, heard.append]).on_end(
        None, Internal("x")
    )
    assert [record.error_kind for record in heard] == ["internal"]
    assert "telemetry of request r-9 failed" in caplog.text


@pytest.mark.parametrize("seed", range(5))
def test_bulk_observation_equals_single_ones(seed: int):
    draw = random.Random(seed)
    bounds = sorted(draw.sample(range(1, 50), 6))
    amounts = [draw.choice([draw.uniform(0, 60), float(draw.choice(bounds))]) for _ in range(200)]
    registries = [CollectorRegistry(), CollectorRegistry()]
    bulk = BulkHistogram("h", "h", ["l"], buckets=bounds, registry=registries[0]).labels("x")
    single = Histogram("h", "h", ["l"], buckets=bounds, registry=registries[1]).labels("x")
    for start, end in itertools.pairwise([0, 50, 50, 200]):
        bulk.observe_many(amounts[start:end])
    for amount in amounts:
        single.observe(amount)
    ours, theirs = (
        {(s.name, *s.labels.items()): s.value for f in r.collect() for s in f.samples if not s.name.endswith("created")}
        for r in registries
    )
    assert ours == pytest.approx(theirs)


def test_token_buckets_are_a_1_2_5_series():
    assert TOKEN_BUCKETS[:7] == (1, 2, 5, 10, 20, 50, 100)
    assert TOKEN_BUCKETS[-1] == 10**6
