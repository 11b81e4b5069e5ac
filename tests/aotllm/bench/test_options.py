"""What may be asked for, and what contradicts itself."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aotllm.bench.arrivals import Arrivals, RampUp
from aotllm.bench.options import LoadOptions, ReportOptions, TargetOptions, WorkloadOptions
from aotllm.errors import InvalidRequest

RAMP = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 4.0}


@pytest.mark.parametrize(
    ("options", "arrivals"),
    [
        ({}, [Arrivals(math.inf, 1.0)]),
        ({"rate": "1,2.5"}, [Arrivals(1.0, 1.0), Arrivals(2.5, 1.0)]),
        ({"rate": "3", "burstiness": "inf"}, [Arrivals(3.0, math.inf)]),
        (RAMP, [Arrivals(math.inf, 1.0, RampUp(1.0, 4.0))]),
    ],
    ids=str,
)
def test_rates(options: dict[str, Any], arrivals: list[Arrivals]):
    assert LoadOptions(**options).sweep_arrivals() == arrivals


def test_concurrencies():
    assert LoadOptions().sweep_concurrencies() == [None]
    assert LoadOptions(concurrency="1,2,8").sweep_concurrencies() == [1, 2, 8]


@pytest.mark.parametrize(
    ("options", "prompts", "seconds"),
    [
        ({}, 100, None),
        ({"num_prompts": 7}, 7, None),
        ({"duration": "90", "rate": "1"}, None, 90.0),
        ({"duration": "1.5m", "num_prompts": 5}, 5, 90.0),
        ({"soak": "2h", "concurrency": "4"}, None, 7200.0),
    ],
    ids=str,
)
def test_number_and_time(options: dict[str, Any], prompts: int | None, seconds: float | None):
    load = LoadOptions(**options)
    assert (load.prompts, load.seconds) == (prompts, seconds)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"rate": "0"}, "rate"),
        ({"rate": "fast"}, "rate"),
        ({"rate": "1,,2"}, "rate"),
        ({"rate": "nan"}, "rate"),
        ({"concurrency": "1.5"}, "concurrency"),
        ({"concurrency": "inf"}, "concurrency"),
        ({"concurrency": "0"}, "concurrency"),
        ({"rate": "1,2", "concurrency": "1,2"}, "concurrency"),
        ({"burstiness": "1,2"}, "burstiness"),
        ({"burstiness": "-1"}, "burstiness"),
        ({"duration": "long", "rate": "1"}, "duration"),
        ({"duration": "0s", "rate": "1"}, "duration"),
        ({"duration": "10s"}, "duration"),
        ({"soak": "10m"}, "soak"),
        ({"soak": "10m", "rate": "1", "duration": "1s"}, "soak"),
        ({"soak": "10m", "rate": "1", "num_prompts": 3}, "soak"),
        ({"soak": "10m", "rate": "1,2"}, "soak"),
        ({"ramp_up_strategy": "linear"}, "ramp_up_strategy"),
        ({"ramp_up_start_rps": 1.0}, "ramp_up_strategy"),
        ({**RAMP, "rate": "2"}, "rate"),
        ({**RAMP, "ramp_up_strategy": "square"}, "ramp_up_strategy"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"warmups": -1}, "warmups"),
    ],
    ids=str,
)
def test_loads_that_make_no_sense(options: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as error:
        LoadOptions(**options)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("cls", "options", "param"),
    [
        (TargetOptions, {"backend": "grpc"}, "backend"),
        (TargetOptions, {"header": ("x",)}, "header"),
        (TargetOptions, {"extra_body": "{"}, "extra_body"),
        (TargetOptions, {"extra_body": "[1]"}, "extra_body"),
        (TargetOptions, {"timeout": 0.0}, "timeout"),
        (WorkloadOptions, {"profile": "all"}, "profile"),
        (WorkloadOptions, {"dataset": "f", "profile": "rag"}, "profile"),
        (WorkloadOptions, {"dataset": "f", "input_len": 3}, "input_len"),
        (WorkloadOptions, {"dataset": "f", "turns": 3}, "turns"),
        (WorkloadOptions, {"range_ratio": 1.5}, "range_ratio"),
        (ReportOptions, {"goodput": ("ttft",)}, "goodput"),
        (ReportOptions, {"metric_percentiles": "101"}, "metric_percentiles"),
        (ReportOptions, {"metric_percentiles": "p99"}, "metric_percentiles"),
        (ReportOptions, {"percentile_metrics": "ttft,latency"}, "percentile_metrics"),
        (ReportOptions, {"plot": "curve.pdf"}, "plot"),
    ],
    ids=str,
)
def test_other_options_that_make_no_sense(cls: type, options: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as error:
        cls(**options)
    assert error.value.param == param


def test_what_is_reported():
    report = ReportOptions(percentile_metrics="e2el, ttft", metric_percentiles="99.9,50,50")
    assert (report.metrics(), report.percents()) == (["ttft", "e2el"], [50.0, 99.9])


def test_headers_and_fields():
    target = TargetOptions(header=("A: b: c",), extra_body='{"top_k": 1}')
    assert (target.headers(), target.extra_fields()) == ({"A": "b: c"}, {"top_k": 1})
