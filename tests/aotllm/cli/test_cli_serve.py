"""`aotllm serve`: names, keys, readiness; the server itself is tested under tests/aotllm/serving."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from aotllm import ExecutorConfig
from tests.aotllm.cli.command_line import CommandLine
from tests.aotllm.fake_manager import FakeManager, ManagerMaker, says


class FakeServer:
    """In place of `run_server`: asks the app for its models once, and returns as after SIGTERM."""

    def __init__(self, api_key: str) -> None:
        self._headers = {"Authorization": f"Bearer {api_key}"}

    def __call__(self, app: FastAPI, host: str, port: int, drain_timeout: float, ready: Callable[[str], None]) -> None:
        self.listen, self.drain_timeout = (host, port), drain_timeout
        ready(f"http://{host}:{port}")
        self.models, self.status = asyncio.run(self._ask(app))

    async def _ask(self, app: FastAPI) -> tuple[list[str], int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            listing = await client.get("/v1/models", headers=self._headers)
            return [card["id"] for card in listing.json().get("data", [])], (await client.get("/v1/models")).status_code


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer("secret")
    monkeypatch.setattr("aotllm.serving.run_server", server)
    monkeypatch.delenv("AOTLLM_API_KEY", raising=False)
    return server


def test_the_model_is_named_like_its_folder(aotllm: CommandLine, server: FakeServer):
    manager = aotllm.use(FakeManager(says("ok")))
    outcome = aotllm("serve", "engines/smollm2/")
    assert (outcome.code, outcome.out) == (0, "")
    first, *table, last = outcome.err.splitlines()
    assert first.startswith("smollm2: KV cache: 320.0 KiB in blocks of 16 tokens hold 640 tokens")
    assert len(table) == 2
    assert last == "serving smollm2 on http://127.0.0.1:8000"
    assert (server.models, server.status, server.listen) == (["smollm2"], 200, ("127.0.0.1", 8000))
    assert manager.shutdowns == [False]


def test_flags(aotllm: CommandLine, server: FakeServer):
    aotllm.use(FakeManager(says("ok")))
    flags = [
        "--host",
        "::1",
        "--http-port",
        0,
        "--served-model-name",
        "one",
        "--api-key",
        "secret",
        "--drain-timeout",
        3,
    ]
    outcome = aotllm("serve", "x", *flags, "--max-queue-size", 7, "--json")
    memory = outcome.json.pop("kv_memory")
    assert outcome.json | {"kv_memory": None} == {"url": "http://::1:0", "models": ["one"], "kv_memory": None}
    assert (memory["one"]["tokens"], memory["one"]["groups"][0]["device_blocks"]) == (640, 40)
    assert (server.models, server.status, server.drain_timeout) == (["one"], 401, 3)


def test_a_key_may_come_from_the_environment(aotllm: CommandLine, server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    aotllm.use(FakeManager(says("ok")))
    monkeypatch.setenv("AOTLLM_API_KEY", "secret")
    assert aotllm("serve", "x").code == 0
    assert (server.models, server.status) == (["x"], 401)


def test_options_reach_the_manager(aotllm: CommandLine, server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    aotllm.use(FakeManager(says("ok")))
    maker = ManagerMaker(FakeManager(says("ok")))
    monkeypatch.setattr("aotllm.executor.RuntimeManager", maker)
    flags = ["--kv-cache-memory", "0.5", "--kv-host-memory", "1GiB", "--capacity-policy", "guaranteed_no_evict"]
    flags += ["--queue-policy", "fcfs", "--max-queued-tokens", 9, "--no-prefix-caching", "--speculative", "ngram"]
    assert aotllm("serve", "x", *flags, "--num-speculative-tokens", 3, "--timeout", 7).code == 0
    assert maker.config == ExecutorConfig(
        kv_cache_memory="0.5",
        kv_host_memory="1GiB",
        capacity_policy="guaranteed_no_evict",
        queue_policy="fcfs",
        max_queued_tokens=9,
        prefix_caching=False,
        speculative="ngram",
        num_speculative_tokens=3,
        timeout=7,
    )


def test_adapters_are_served_by_name(aotllm: CommandLine, server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("aotllm.adapters.read_adapter", str)
    manager = aotllm.use(FakeManager(says("ok")))
    outcome = aotllm("serve", "x", "--lora", "poet=a/b", "--lora", "cook=c")
    assert (outcome.code, server.models) == (0, ["x", "poet", "cook"])
    assert manager.adapters == {1: "a/b", 2: "c"}


def test_several_engines(aotllm: CommandLine, server: FakeServer):
    aotllm.use(FakeManager(says("ok")))
    assert aotllm("serve", "x/a", "y/a", "--served-model-name", "b", "--served-model-name", "c").code == 0
    assert server.models == ["b", "c"]


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_a_missing_extra_is_one_sentence_that_says_what_to_install(
    aotllm: CommandLine, monkeypatch: pytest.MonkeyPatch, missing: str
):
    aotllm.use(FakeManager(says("ok")))
    modules: list[Any] = [name for name in sys.modules if name.startswith("aotllm.serving")]
    for name in modules:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    outcome = aotllm("serve", "x")
    assert outcome.code == 1
    assert outcome.err.startswith(f"error: the HTTP server needs {missing}, which is not installed")
    assert outcome.err.endswith("pip install 'aotllm[serve]'\n")
