"""Repeats of a point: spread, the run that stands for all, JSON, and remarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from aotllm.bench.offline_point import OfflineContext, OfflinePoint, remarks
from aotllm.bench.record import RequestRecord
from aotllm.bench.result import BenchPoint
from aotllm.bench.spread import Spread
from tests.aotllm.bench.points import point, record

CONTEXT = OfflineContext(target="cpu", num_threads=2, load_seconds=0.5, kv_cache_tokens=640)


def run(duration: float, records: Sequence[RequestRecord] = (record(10.0, 0.5),)) -> BenchPoint:
    made = point(records=records)
    return replace(made, measures=replace(made.measures, duration=duration))


def made(*durations: float, **fields: int) -> OfflinePoint:
    return OfflinePoint(CONTEXT, **fields, runs=[run(duration) for duration in durations])


def test_a_spread():
    spread = Spread.of([3.0, None, 1.0, 2.0])
    assert spread is not None
    assert spread.json() == {"min": 1.0, "median": 2.0, "max": 3.0, "samples": [3.0, 1.0, 2.0]}
    assert (spread.text(), spread.text(0, 1000)) == ("2.0 (1.0–3.0)", "2,000 (1,000–3,000)")
    assert Spread((2.0,)).text(2) == "2.00"
    assert Spread.of([None]) is None


def test_the_run_of_median_throughput_stands_for_all():
    assert made(2.0, 1.0, 4.0).typical.measures.duration == 2.0
    assert made(2.0, 1.0, 4.0, 3.0).typical.measures.duration == 3.0  # of two in the middle, the slower one


def test_json_has_the_typical_run_and_the_spread():
    value = json.loads(json.dumps(made(2.0, 1.0, 4.0).json(), allow_nan=False))
    assert (value["duration"], value["output_throughput"]) == (2.0, 1.5)
    assert value["repeats"]["output_throughput"] == {
        "min": 0.75,
        "median": 1.5,
        "max": 3.0,
        "samples": [1.5, 3.0, 0.75],
    }
    assert value["repeats"]["latency"]["samples"] == [2.0, 1.0, 4.0]
    assert (value["target"], value["num_threads"], value["kv_cache_tokens"]) == ("cpu", 2, 640)
    assert "prefill_throughput" not in value  # which only a batch has that begins together


def test_json_of_a_batch_has_its_phases():
    value = made(2.0, batch_size=1, depth=7).json()
    assert (value["batch_size"], value["depth"]) == (1, 7)
    assert value["prefill_throughput"]["median"] == pytest.approx((5 - 1) / 0.5)
    assert value["decode_throughput"] is None  # the record counts no tokens by chunk


def test_remarks():
    assert remarks([made(2.0)]) == []
    (told,) = remarks([replace(made(2.0), preemptions=3)])
    assert told.startswith("concurrency 2: 3 preemptions: the KV cache holds 640 tokens")
    lines = remarks([made(2.0, batch_size=1, depth=7)])
    assert lines[0].startswith("batch 1, depth 7: only 1 of 7 tokens were found in the KV cache")
    assert "longer --output-len" in lines[1]
