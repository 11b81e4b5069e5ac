"""Metrics on a real model: what front ends count agrees with what the runtime counts."""

from __future__ import annotations

from aotllm import Executor
from aotllm.engines import Engine
from tests.aotllm.serving.http_client import Client
from tests.aotllm.serving.prometheus_samples import metrics_of

BODY = {
    "prompt": "The sea is blue because the light of the sun",
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}


def test_counts_of_requests_and_of_the_runtime_agree(smollm2: Engine):
    with Executor(smollm2, num_threads=2) as executor:
        client = Client({"m": executor}, log_requests=False)
        usages = [client.post("/v1/completions", {**BODY, "n": n, "stream": False}).json()["usage"] for n in (1, 1, 3)]
        counts = metrics_of(client)
        status = client.get("/status.json").json()
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    generated = 12 * (1 + 1 + 3)
    assert counts("aotllm:prompt_tokens_total") == prompt
    assert counts("aotllm:prompt_tokens_cached_total") == cached > 0
    assert counts("aotllm:generation_tokens_total") == counts("aotllm:engine_generated_tokens_total") == generated
    assert counts("aotllm:inter_token_latency_seconds_count") == generated - 5, "each sequence has a first token"
    # The runtime counts sequences, each with its prompt, and all but what the cache had was computed.
    queries, hits = counts("aotllm:prefix_cache_queries_total"), counts("aotllm:prefix_cache_hits_total")
    assert queries == prompt // 3 * 5
    assert counts("aotllm:engine_context_tokens_total") == queries - hits
    assert counts("aotllm:iteration_tokens_total_sum") == queries - hits + generated
    assert counts("aotllm:cache_config_info", block_size="16") == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_blocks_used", "kv_cache_usage_perc"):
        assert counts(f"aotllm:{name}") == 0, "all is over"
    for part in ("queue", "prefill", "decode", "inference"):
        assert counts(f"aotllm:request_{part}_time_seconds_count") == 3
    parts = sum(counts(f"aotllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert 0 < parts <= counts("aotllm:e2e_request_latency_seconds_sum")
    assert status["models"][0]["max_model_len"] == 2048
    assert status["points"][-1]["kv_total"] == counts("aotllm:kv_blocks_capacity")
