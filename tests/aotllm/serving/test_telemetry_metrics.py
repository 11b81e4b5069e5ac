"""/metrics against what was asked: every figure is known from the scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aotllm import Executor
from aotllm.errors import Internal
from aotllm.serving.context import ServingContext
from aotllm.serving.options import ServingOptions
from aotllm.serving.repository import LocalRepository
from aotllm.serving.telemetry.base import NoTelemetry
from aotllm.serving.telemetry.engine_metrics import EngineReading, engine_families
from aotllm.serving.telemetry.metrics import create_metrics_app
from aotllm.serving.telemetry.serving_telemetry import ServingTelemetry
from aotllm.stats import ExecutorStats
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask, Client
from tests.aotllm.serving.prometheus_samples import metrics_of

COMPLETIONS = "/v1/completions"


def test_counts_and_lengths_of_requests(ask: Ask):
    client = ask(FakeManager(says("hello"), num_cached_tokens=2))
    client.post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 9})
    client.post(COMPLETIONS, {"prompt": [[1, 2, 3, 4], [5, 6]], "max_tokens": 3, "n": 2, "stream": True})
    counts = metrics_of(client)
    assert {
        "prompt": counts("aotllm:prompt_tokens_total", model_name="m", engine="0"),
        "cached": counts("aotllm:prompt_tokens_cached_total"),
        "generated": counts("aotllm:generation_tokens_total"),
        "stop": counts("aotllm:request_success_total", finished_reason="stop"),
        "length": counts("aotllm:request_success_total", finished_reason="length"),
        "all": counts("aotllm:request_success_total"),
    } == {"prompt": 3 + 4 + 2, "cached": 3 * 2, "generated": 6 + 2 * 2 * 3, "stop": 1, "length": 2, "all": 3}
    # name -> (values that are at most 5, sum, count)
    assert {
        name: (
            counts(f"aotllm:{name}_bucket", le="5.0"),
            counts(f"aotllm:{name}_sum"),
            counts(f"aotllm:{name}_count"),
        )
        for name in (
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
            "request_params_n",
            "request_params_max_tokens",
        )
    } == {
        "request_prompt_tokens": (3, 9, 3),
        "request_generation_tokens": (0, 6 + 6 + 6, 3),
        "request_max_num_generation_tokens": (2, 6 + 3 + 3, 3),
        "request_params_n": (3, 1 + 2 + 2, 3),
        "request_params_max_tokens": (2, 9 + 3 + 3, 3),
    }
    # A first token per request, an interval per further token of a sequence.
    assert counts("aotllm:time_to_first_token_seconds_count") == 3
    assert counts("aotllm:inter_token_latency_seconds_count") == 5 + 4 * 2
    assert counts("aotllm:request_time_per_output_token_seconds_count") == 1 + 4


@pytest.mark.parametrize(
    "name",
    [
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
        "request_inference_time",
    ],
)
def test_each_finished_request_is_timed_once(ask: Ask, name: str):
    client = ask(FakeManager(says("ok")))
    for _ in range(2):
        client.post(COMPLETIONS, {"prompt": "a"})
    assert metrics_of(client)(f"aotllm:{name}_seconds_count") == 2


@pytest.mark.parametrize(
    "body",
    [{"best_of": 3, "n": 1}, {"use_beam_search": True, "n": 2, "max_tokens": 2}],
    ids=["best_of", "beam_search"],
)
def test_answers_that_are_not_shown_count_as_tokens(ask: Ask, body: dict[str, object]):
    client = ask(FakeManager(says("ok"), top=lambda _: [(65, -0.5), (66, -1.0), (67, -1.5), (68, -2.0)]))
    response = client.post(COMPLETIONS, {"prompt": "a", **body})
    generated = response.json()["usage"]["completion_tokens"]
    counts = metrics_of(client)
    assert counts("aotllm:generation_tokens_total") == generated
    assert counts("aotllm:time_to_first_token_seconds_count") == 1
    assert counts("aotllm:inter_token_latency_seconds_count") == 0, "they come at once: there is no latency to see"


def test_series_exist_before_the_first_request(ask: Ask):
    counts = metrics_of(ask(FakeManager()))
    assert counts("aotllm:request_success_total", model_name="m", finished_reason="length") == 0
    assert counts("aotllm:request_errors_total", kind="overloaded") == 0
    assert counts("aotllm:time_to_first_token_seconds_count") == 0
    assert counts("nv_inference_request_success", model="m", version="1") == 0


def test_refusals_and_faults_by_kind(ask: Ask):
    client = ask(FakeManager(lambda _: [Internal("broken")], max_queue_size=1, max_seq_len=64))
    assert client.post(COMPLETIONS, {"prompt": "a"}).status_code == 500
    assert client.post(COMPLETIONS, {"prompt": [1] * 100}).status_code == 400
    assert client.post(COMPLETIONS, {"prompt": [10**6]}).status_code == 400
    counts = metrics_of(client)
    kinds = ("internal", "context_too_long", "invalid_request", "overloaded")
    assert [counts("aotllm:request_errors_total", kind=kind) for kind in kinds] == [1, 1, 1, 0]
    assert counts("aotllm:request_success_total", finished_reason="error") == 3
    assert counts("aotllm:e2e_request_latency_seconds_count") == 0, "what has no answer has no latency"
    reasons = ("BACKEND", "OTHER", "REJECTED", "CANCELED")
    assert [counts("nv_inference_request_failure", reason=reason) for reason in reasons] == [1, 2, 0, 0]


def test_a_full_queue_is_a_refusal(ask: Ask):
    client = ask(FakeManager(says("ok"), stepping="by hand", max_queue_size=1))
    assert client.post(COMPLETIONS, {"prompt": ["a", "b"]}).status_code == 503
    counts = metrics_of(client)
    assert counts("aotllm:request_errors_total", kind="overloaded") == 1
    assert counts("aotllm:request_success_total", finished_reason="abort") == 1, "the other one was taken back"
    assert counts("nv_inference_request_failure", reason="REJECTED") == 1
    assert counts("nv_inference_request_failure", reason="CANCELED") == 1


def test_http_requests_are_counted_by_route_and_status(ask: Ask):
    client = ask(FakeManager(says("ok")), api_key=["key"])
    key = {"Authorization": "Bearer key"}
    client.post(COMPLETIONS, {"prompt": "a"}, headers=key)
    client.post(COMPLETIONS, {"prompt": "a"})
    client.post(COMPLETIONS, {"prompt": "a", "temperature": -1}, headers=key)
    client.get("/v1/models/other", headers=key)
    client.get("/wp-login.php")
    client.request("BREW", "/pot")
    counts = metrics_of(client)
    assert counts("aotllm:http_requests_total", method="POST", route=COMPLETIONS, status="200") == 1
    assert counts("aotllm:http_requests_total", method="POST", route=COMPLETIONS, status="400") == 1
    assert counts("aotllm:http_requests_total", method="POST", route="none", status="401") == 1
    assert counts("aotllm:http_requests_total", method="GET", route="/v1/models/{name:path}", status="404") == 1
    assert counts("aotllm:http_requests_total", method="GET", route="none", status="404") == 1
    assert counts("aotllm:http_requests_total", method="OTHER", route="none", status="404") == 1


def test_metrics_need_no_key(ask: Ask):
    assert ask(FakeManager(), api_key=["key"]).get("/metrics").status_code == 200


def test_tritons_counters_have_tritons_names_and_types(ask: Ask):
    client = ask(FakeManager(says("ok")))
    client.post(COMPLETIONS, {"prompt": ["a", "b"]})
    counts = metrics_of(client)
    assert counts("nv_inference_request_success", model="m", version="1") == 2
    assert counts("nv_inference_count", model="m") == 2
    assert counts("nv_inference_exec_count", model="m") == 3
    assert counts("nv_inference_pending_request_count", model="m") == 0
    whole = counts("nv_inference_request_duration_us", model="m")
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert 0 < sum(counts(f"nv_inference_{part}_duration_us", model="m") for part in parts) <= whole + len(parts)
    for name in ("nv_inference_request_success", "nv_inference_request_duration_us", "nv_inference_exec_count"):
        assert counts.types[name] == "counter"
    assert not any(name.startswith("nv_") and name.endswith("_total") for name in counts.names)


class EngineManager(FakeManager):
    """With figures as the runtime has them."""

    def stats(self) -> SimpleNamespace:
        cache = SimpleNamespace(queried_tokens=100, hit_tokens=40, evicted_blocks=3)
        return SimpleNamespace(
            running=2, queued=5, steps=10, blocks_used=30, blocks_total=40, blocks_cached=6, preemptions=7,
            context_tokens=60, generated_tokens=20, draft_tokens=9, accepted_tokens=4, cache=cache,
        )  # fmt: skip


ENGINE_METRICS = {
    "aotllm:engine_up": 1,
    "aotllm:num_requests_running": 2,
    "aotllm:num_requests_waiting": 5,
    "aotllm:kv_cache_usage_perc": 0.75,
    "aotllm:kv_blocks_capacity": 40,
    "aotllm:kv_blocks_used": 30,
    "aotllm:kv_blocks_cached": 6,
    "aotllm:num_preemptions_total": 7,
    "aotllm:prefix_cache_queries_total": 100,
    "aotllm:prefix_cache_hits_total": 40,
    "aotllm:kv_blocks_evicted_total": 3,
    "aotllm:spec_decode_num_draft_tokens_total": 9,
    "aotllm:spec_decode_num_accepted_tokens_total": 4,
    "aotllm:engine_steps_total": 10,
    "aotllm:iteration_tokens_total_sum": 80,
    "aotllm:iteration_tokens_total_count": 10,
}


def test_figures_of_the_engine(ask: Ask):
    counts = metrics_of(ask(EngineManager()))
    assert {name: counts(name, model_name="m", engine="0") for name in ENGINE_METRICS} == ENGINE_METRICS
    assert counts("aotllm:cache_config_info", model_name="m", block_size="16", num_gpu_blocks="40") == 1
    assert "aotllm:kv_blocks_offloaded_total" not in counts.names, "the runtime did not say"
    assert counts("nv_inference_pending_request_count", model="m") == 5


def test_counters_of_another_process_may_be_mappings(start: Callable[..., Executor]):
    class Mappings(EngineManager):
        def stats(self) -> SimpleNamespace:
            stats = super().stats()
            stats.cache = vars(stats.cache)
            return stats

    counts = metrics_of(Client({"m": start(Mappings())}))
    assert counts("aotllm:prefix_cache_hits_total") == 40


def test_an_engine_that_fails_hides_no_other(start: Callable[..., Executor]):
    class Broken(FakeManager):
        def stats(self) -> SimpleNamespace:
            raise Internal("gone")

    counts = metrics_of(Client({"bad": start(Broken()), "good": start(EngineManager())}))
    assert [counts("aotllm:engine_up", model_name=name) for name in ("bad", "good")] == [0, 1]
    assert counts("aotllm:num_requests_running") == 2


def test_an_engine_that_hangs_hides_no_other(start: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("aotllm.serving.telemetry.engine_metrics._PATIENCE", 0.01)
    hanging, good = start(FakeManager()), start(EngineManager())

    async def never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(hanging, "stats_async", never)
    counts = metrics_of(Client({"bad": hanging, "good": good}))
    assert [counts("aotllm:engine_up", model_name=name) for name in ("bad", "good")] == [0, 1]


def test_loaded_adapters_are_told_to_gateways():
    memory = SimpleNamespace(
        groups=[SimpleNamespace(device_blocks=1, host_blocks=0)], tokens_per_block=1, device_bytes=1
    )
    engines = {"plain": SimpleNamespace(lora_names=()), "tuned": SimpleNamespace(lora_names=("x", "y"))}
    readings: Any = [EngineReading(n, e, True, ExecutorStats(), memory) for n, e in engines.items()]  # type: ignore[arg-type]
    (family,) = [f for f in engine_families(readings) if f.name == "aotllm:lora_requests_info"]
    assert [sample.labels for sample in family.samples] == [
        {
            "model_name": "tuned",
            "engine": "0",
            "max_lora": "2",
            "running_lora_adapters": "x,y",
            "waiting_lora_adapters": "",
        }
    ]


def test_a_fault_of_the_server_is_internal(ask: Ask):
    class Broken(FakeManager):
        def submit(self, request: object) -> int:
            raise RuntimeError("a bug")

    client = ask(Broken())
    assert client.post(COMPLETIONS, {"prompt": "a"}).status_code == 500
    counts = metrics_of(client)
    assert counts("aotllm:request_errors_total", kind="internal") == 1
    assert counts("aotllm:http_requests_total", route=COMPLETIONS, status="500") == 1
    assert counts("nv_inference_request_failure", reason="BACKEND") == 1


def test_engines_have_series_of_their_own(start: Callable[..., Executor]):
    client = Client({"a": start(FakeManager(says("x"))), "b": start(FakeManager(says("x")))})
    client.post(COMPLETIONS, {"model": "b", "prompt": "a"})
    client.post(COMPLETIONS, {"model": "no such model", "prompt": "a"})
    counts = metrics_of(client)
    assert [counts("aotllm:request_success_total", model_name=name) for name in ("a", "b")] == [0, 1]
    assert "no such model" not in client.get("/metrics").text


def test_a_port_of_its_own(start: Callable[..., Executor]):
    options = ServingOptions()
    context = ServingContext(LocalRepository({"m": start(FakeManager())}), options, ServingTelemetry(options))
    app = create_metrics_app(context)
    client = Client.__new__(Client)
    client.app = app
    assert metrics_of(client)("aotllm:engine_up") == 1
    assert client.get("/v1/models").status_code == 404


def test_engines_are_measured_without_telemetry_of_requests(start: Callable[..., Executor]):
    context = ServingContext(LocalRepository({"m": start(FakeManager())}), telemetry=NoTelemetry())
    client = Client.__new__(Client)
    client.app = create_metrics_app(context)
    assert metrics_of(client)("aotllm:engine_up") == 1
