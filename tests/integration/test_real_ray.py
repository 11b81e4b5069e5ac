"""`aotllm serve --ray` with a real engine: it serves, shares the prefix cache between requests, and ends on SIGTERM."""

from __future__ import annotations

import socket

import httpx
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.executor_config import ExecutorConfig
from tests.integration.running_server import running_server

pytest.importorskip("ray", reason="needs the extra `ray`")

PROMPT = "The capital of France is"


def test_it_serves_until_sigterm(smollm2: Engine):
    with Executor(smollm2, ExecutorConfig(num_threads=1)) as executor:
        (expected,) = executor.generate(Request(prompt=PROMPT, sampling=SamplingParams(temperature=0.0, max_tokens=8)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    replicas = {"ray": True, "max_replicas": 2, "cpus_per_replica": 0.5, "num_threads": 1}
    # A process of its own: Ray keeps its handlers of signals, and its daemons, for as long as the process lives.
    with running_server(smollm2.path, http_port=port, drain_timeout=5, **replicas) as server:
        body = {"model": server.models[0], "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answers = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
        assert server.stop() == 0
    assert [answer["choices"][0]["text"] for answer in answers] == [expected.text] * 2
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
