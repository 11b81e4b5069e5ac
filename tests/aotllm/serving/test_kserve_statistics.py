"""Counts and times by model."""

from __future__ import annotations

import itertools
import json
import queue
from typing import Any

import pytest
import tritonclient.grpc as triton
import tritonclient.http
from tritonclient.utils import InferenceServerException

from aotllm.serving.kserve.statistics import Statistics
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.kserve_server import KserveServer, Serve
from tests.aotllm.serving.kserve_tensors import prompt


def counts(server: KserveServer, model: str) -> dict[str, int]:
    """By both protocols, which have to agree."""
    rpc = triton.InferenceServerClient(server.grpc).get_inference_statistics(model, as_json=True)["model_stats"]
    http = tritonclient.http.InferenceServerClient(server.http).get_inference_statistics(model)["model_stats"]
    assert len(rpc) == len(http) == 1
    for name, duration in http[0]["inference_stats"].items():
        told = rpc[0]["inference_stats"][name]
        assert {key: int(value) for key, value in told.items()} == {k: v for k, v in duration.items() if v}
    stats = {name: duration["count"] for name, duration in http[0]["inference_stats"].items() if duration["count"]}
    assert http[0]["inference_count"] == http[0]["execution_count"] == stats.get("success", 0)
    cancelled = http[0]["response_stats"].get("0", {}).get("cancel", {}).get("count", 0)
    return stats | ({"cancel": cancelled} if cancelled else {})


def test_success_and_failure(kserve: Serve):
    server = kserve(FakeManager(says("sea")))
    client = triton.InferenceServerClient(server.grpc)
    assert counts(server, "m") == {}
    client.infer("m", prompt(triton, [["a"], ["b"]]))
    done: dict[str, int] = {"success": 2, "queue": 2, "compute_input": 2, "compute_infer": 2, "compute_output": 1}
    assert counts(server, "m") == done
    with pytest.raises(InferenceServerException, match="maximum context length"):
        client.infer("m", prompt(triton, max_tokens=10_000))
    assert counts(server, "m") == done | {"fail": 1}
    assert counts(server, "ensemble") == {}
    http = tritonclient.http.InferenceServerClient(server.http)
    http.infer("ensemble", prompt(tritonclient.http))
    assert counts(server, "ensemble")["success"] == 1
    names = [one["name"] for one in http.get_inference_statistics()["model_stats"]]
    assert names == ["m", "ensemble", "tensorrt_llm_bls", "tensorrt_llm"]


def test_a_cancelled_request_counts(kserve: Serve):
    manager = FakeManager(lambda _: itertools.cycle(b"x"), stepping="by hand")
    server = kserve(manager)
    client = triton.InferenceServerClient(server.grpc)
    done: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: done.put((result, error)))
    client.async_stream_infer("m", prompt(triton, stream=True))
    manager.wait_until(lambda m: m.running == [1])
    manager.step()
    done.get(timeout=60)
    client.stop_stream(cancel_requests=True)
    manager.wait_until(lambda m: not m.running)
    # Responses of the manager are delivered in order: with that of the next request, the first one's has been, too.
    next_one: queue.Queue[Any] = queue.Queue()
    client.async_infer("ensemble", prompt(triton, max_tokens=1), lambda result, error: next_one.put(error))
    manager.wait_until(lambda m: m.running == [2])
    manager.step()
    assert next_one.get(timeout=60) is None
    assert counts(server, "m") == {"fail": 1, "cancel": 1}


def test_times_add_up(kserve: Serve):
    server = kserve(FakeManager(says("sea")))
    triton.InferenceServerClient(server.grpc).infer("m", prompt(triton))
    client = tritonclient.http.InferenceServerClient(server.http)
    (stats,) = client.get_inference_statistics("m")["model_stats"]
    times = {name: duration["ns"] for name, duration in stats["inference_stats"].items()}
    assert times["queue"] + times["compute_input"] + times["compute_infer"] == times["success"]
    assert stats["last_inference"] > 1_600_000_000_000  # milliseconds since 1970


def test_front_ends_add_up():
    a, b, total = Statistics(), Statistics(), Statistics()
    a.record("m", {"success": 5, "queue": 1}, last_inference=7)
    b.record("m", {"success": 6}, last_inference=9)
    b.record("n", {"fail": 2}, last_inference=3)
    for one in (a, b):
        total.add(json.loads(json.dumps(one.snapshot())))  # it travels
    m, n = total.of("m", "1"), total.of("n", "1")
    assert (m["inference_stats"]["success"], m["inference_stats"]["queue"]) == (
        {"count": 2, "ns": 11},
        {"count": 1, "ns": 1},
    )
    assert (m["last_inference"], n["last_inference"], n["inference_stats"]["fail"]["count"]) == (9, 3, 1)
    assert a.of("m", "1")["inference_count"] == 1  # a snapshot is a copy
    assert total.of("nobody", "1")["inference_count"] == 0
    assert "nobody" not in total.snapshot()["models"]
