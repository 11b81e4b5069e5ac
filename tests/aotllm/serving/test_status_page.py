"""The page's figures, and its files. How it behaves in a browser: test_status_page_browser.py."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aotllm import Executor
from aotllm.serving.status_page.history import MINUTES, StatusHistory
from aotllm.serving.status_page.snapshot import COUNTERS, GAUGES, Snapshot, quantile
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask, Client

NOTHING = Snapshot(0.0, dict.fromkeys(COUNTERS, 0.0), dict.fromkeys(GAUGES, 0.0), {"ttft": {}, "itl": {}, "e2e": {}})


def at(time: float, **counters: float) -> Snapshot:
    return replace(NOTHING, time=time, counters={**NOTHING.counters, **counters})


def last_point(*snapshots: Snapshot) -> dict[str, Any]:
    history = StatusHistory()
    for snapshot in snapshots:
        history.add(snapshot)
    return history.points(0)[-1]


# Percentiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "buckets", "value"),
    [
        (0.5, {1.0: 0, 2.0: 10, math.inf: 10}, 1.5),
        (0.5, {1.0: 10, 2.0: 10, math.inf: 10}, 0.5),
        (1.0, {1.0: 5, 2.0: 10, math.inf: 10}, 2.0),
        (0.25, {1.0: 5, 2.0: 10, math.inf: 10}, 0.5),
        (0.99, {1.0: 5, 2.0: 10, math.inf: 20}, 2.0),  # beyond the largest bound
        (0.5, {1.0: 0, math.inf: 0}, None),
        (0.5, {}, None),
    ],
)
def test_quantiles_of_buckets(q: float, buckets: dict[float, float], value: float | None):
    assert quantile(q, buckets) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize("seed", range(5))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(seed: int):
    draw = random.Random(seed)
    values = sorted(draw.expovariate(1) for _ in range(500))
    bounds = [0.0, 0.1, 0.3, 0.7, 1.5, 3.0, 20.0]
    buckets = {bound: float(sum(v <= bound for v in values)) for bound in [*bounds[1:], math.inf]}
    for q in (0.01, 0.5, 0.9, 0.99):
        true = values[math.ceil(q * len(values)) - 1]
        low, high = next((lo, hi) for lo, hi in itertools.pairwise(bounds) if true <= hi)
        found = quantile(q, buckets)
        assert found is not None
        assert low <= found <= high


# History --------------------------------------------------------------------------------------------------------------


def test_rates_are_differences_over_time():
    point = last_point(at(10, generation_tokens=100, requests=3), at(14, generation_tokens=300, requests=5))
    assert point["generation_tokens_per_second"] == 50
    assert point["requests_per_second"] == 0.5


def test_a_first_point_has_no_rates():
    point = last_point(at(10, generation_tokens=100))
    assert point["generation_tokens_per_second"] is None
    assert point["prefix_hit_rate"] is None
    assert point["ttft"] == {"p50": None, "p90": None, "p99": None}


def test_a_counter_that_begins_again_gives_no_negative_rate():
    point = last_point(at(10, prompt_tokens=1000), at(12, prompt_tokens=30))
    assert point["prompt_tokens_per_second"] == 15


def test_gauges_are_those_of_the_moment():
    point = last_point(replace(at(1), gauges={"running": 3, "waiting": 4, "kv_used": 5, "kv_total": 20}))
    assert (point["running"], point["waiting"], point["kv_usage"]) == (3, 4, 0.25)
    assert last_point(at(1))["kv_usage"] is None


def test_hit_rate_and_percentiles_are_of_the_last_minute():
    def at_second(second: int) -> Snapshot:
        # For 100 seconds slow first tokens and no hits, then fast ones and hits for half of the tokens.
        slow, fast = min(second, 100), max(0, second - 100)
        ttft = {0.1: float(fast), 10.0: float(fast + slow), math.inf: float(fast + slow)}
        counters = {"prefix_queries": second * 10.0, "prefix_hits": fast * 5.0}
        return replace(at(second, **counters), histograms={"ttft": ttft, "itl": {}, "e2e": {}})

    history = StatusHistory()
    for second in range(1, 201, 2):
        history.add(at_second(second))
    points = {point["t"]: point for point in history.points(0)}
    assert points[99]["prefix_hit_rate"] == 0
    assert points[99]["ttft"]["p50"] > 0.1
    # A minute (and the step before it) after the change nothing of the time before counts.
    assert points[163]["prefix_hit_rate"] == 0.5
    assert points[163]["ttft"]["p99"] < 0.1
    assert 0 < points[131]["prefix_hit_rate"] < 0.5


def test_only_the_last_minutes_are_kept():
    history = StatusHistory()
    for second in range(0, 3600, 2):
        history.add(at(float(second)))
    times = [point["t"] for point in history.points(0)]
    assert times[0] == 3598 - MINUTES * 60
    assert times == sorted(times)
    assert history.points(3590)[0]["t"] == 3592
    assert len(history._snapshots) < 40


def test_a_clock_that_is_set_back_begins_a_new_history():
    history = StatusHistory()
    for second in (100.0, 102.0, 50.0):
        history.add(at(second))
    assert [point["t"] for point in history.points(0)] == [50]
    assert history.points(0)[0]["generation_tokens_per_second"] is None


def test_a_crowd_of_pages_costs_one_reading_a_second():
    history = StatusHistory()
    assert history.due(10)
    history.add(at(10))
    assert [history.due(second) for second in (10, 10.9, 11, 9)] == [False, False, True, True]


# Over HTTP ------------------------------------------------------------------------------------------------------------


def test_status_has_the_figures_of_metrics(start: Callable[..., Executor]):
    client = Client({"a": start(FakeManager(says("sea"))), "b": start(FakeManager(says("sea")))}, api_key=["key"])
    key = {"Authorization": "Bearer key"}
    client.post("/v1/completions", {"model": "a", "prompt": "x"}, headers=key)
    status = client.get("/status.json").json()
    assert status["state"] == "ready"
    assert status["needs_key"] is True
    assert [(model["name"], model["state"], model["alive"]) for model in status["models"]] == [
        ("a", "READY", True),
        ("b", "READY", True),
    ]
    (point,) = status["points"]
    assert (point["kv_used"], point["kv_total"]) == (2, 8), "of both engines"
    assert client.get(f"/status.json?since={point['t'] + 100}").json()["points"] == []


def test_a_snapshot_sums_over_models(start: Callable[..., Executor]):
    from aotllm.serving.telemetry.request_metrics import RequestMetrics

    metrics = RequestMetrics()
    for model, seconds in (("a", 0.005), ("b", 0.005), ("b", 30.0)):
        metrics.of(model).saw_first_token(seconds)
        metrics.of(model).count_tokens(4, [])
    snapshot = Snapshot.of(metrics.registry.collect(), 7.0)
    assert snapshot.time == 7
    assert snapshot.counters["generation_tokens"] == 12
    assert (snapshot.histograms["ttft"][0.005], snapshot.histograms["ttft"][math.inf]) == (2, 3)


def test_an_unloaded_engine_is_listed(start: Callable[..., Executor]):
    import asyncio

    from aotllm.serving.app import create_app
    from aotllm.serving.context import ServingContext
    from aotllm.serving.repository import LocalRepository

    repository = LocalRepository({"a": start(FakeManager()), "b": start(FakeManager())})
    asyncio.run(repository.unload("b"))
    client = Client.__new__(Client)
    client.app = create_app(ServingContext(repository))
    models = client.get("/status.json").json()["models"]
    assert [(model["name"], model["state"], model.get("alive")) for model in models] == [
        ("a", "READY", True),
        ("b", "UNAVAILABLE", None),
    ]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/status/style.css", "text/css"),
        ("/status/status.js", "text/javascript"),
        ("/status/charts.js", "text/javascript"),
        ("/status/chat.js", "text/javascript"),
        ("/status/icon.svg", "image/svg+xml"),
    ],
)
def test_files_come_with_a_strict_policy(ask: Ask, path: str, kind: str):
    response = ask(FakeManager(), api_key=["key"]).get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(kind)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_names_only_files_that_are_served_from_here(ask: Ask):
    client = ask(FakeManager())
    page = client.get("/").text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert links
    for link in links:
        assert client.get(link).status_code == 200, link
    assert "style=" not in page
    assert "<script>" not in page


@pytest.mark.parametrize("name", ["x.js", "..%2f..%2froutes.py", "%2e%2e/index.html", "index.html%00"])
def test_no_other_files_are_served(ask: Ask, name: str):
    assert ask(FakeManager()).get(f"/status/{name}").status_code == 404


def test_the_page_can_be_turned_off(ask: Ask):
    client = ask(FakeManager(), status_page=False)
    assert [client.get(path).status_code for path in ("/", "/status.json", "/metrics")] == [404, 404, 200]
