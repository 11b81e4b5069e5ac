"""`aotllm serve`: names, keys, readiness; the server itself is tested under tests/aotllm/serving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from starlette.applications import Starlette

from aotllm import ExecutorConfig
from aotllm.serving import create_app
from aotllm.serving.context import ServingContext
from tests.aotllm.cli.command_line import CommandLine, Outcome
from tests.aotllm.fake_manager import FakeManager, ManagerMaker, says

Serve = Callable[..., Outcome]


class FakeServer:
    """In place of `run_server`: asks for its models once, and returns as after SIGTERM."""

    def __init__(self, api_key: str) -> None:
        self._headers = {"Authorization": f"Bearer {api_key}"}

    def __call__(
        self,
        context: ServingContext,
        host: str,
        http_port: int,
        drain_timeout: float,
        ready: Callable[[dict[str, str]], None],
        *,
        grpc_port: int | None,
        metrics_port: int | None,
    ) -> None:
        self.listen, self.drain_timeout = (host, http_port, grpc_port, metrics_port), drain_timeout
        ready({"http": f"{host}:{http_port}"})
        self.models, self.status = asyncio.run(self._ask(create_app(context)))

    async def _ask(self, app: Starlette) -> tuple[list[str], int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            listing = await client.get("/v1/models", headers=self._headers)
            return [card["id"] for card in listing.json().get("data", [])], (await client.get("/v1/models")).status_code


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer("secret")
    monkeypatch.setattr("aotllm.serving.run_server", server)
    monkeypatch.delenv("AOTLLM_API_KEY", raising=False)
    return server


@pytest.fixture
def serve(aotllm: CommandLine) -> Serve:
    """`aotllm serve` in this process."""
    return lambda *arguments: aotllm("serve", *arguments, "--frontends", 0)


def test_the_model_is_named_like_its_folder(aotllm: CommandLine, serve: Serve, server: FakeServer):
    manager = aotllm.use(FakeManager(says("ok")))
    outcome = serve("engines/smollm2/")
    assert (outcome.code, outcome.out) == (0, "")
    first, *table, last = outcome.err.splitlines()
    assert first.startswith("smollm2: KV cache: 320.0 KiB in blocks of 16 tokens hold 640 tokens")
    assert len(table) == 2
    assert last == "serving smollm2 on http://127.0.0.1:8000"
    assert (server.models, server.status, server.listen) == (["smollm2"], 200, ("127.0.0.1", 8000, 8001, 8002))
    assert manager.shutdowns == [False]


def test_flags(aotllm: CommandLine, serve: Serve, server: FakeServer):
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
    outcome = serve("x", *flags, "--max-queue-size", 7, "--json")
    memory = outcome.json.pop("kv_memory")
    assert outcome.json | {"kv_memory": None} == {"url": "http://::1:0", "models": ["one"], "kv_memory": None}
    assert (memory["one"]["tokens"], memory["one"]["groups"][0]["device_blocks"]) == (640, 40)
    assert (server.models, server.status, server.drain_timeout) == (["one"], 401, 3)


def test_a_key_may_come_from_the_environment(
    aotllm: CommandLine, serve: Serve, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    aotllm.use(FakeManager(says("ok")))
    monkeypatch.setenv("AOTLLM_API_KEY", "secret")
    assert serve("x").code == 0
    assert (server.models, server.status) == (["x"], 401)


def test_options_reach_the_manager(
    aotllm: CommandLine, serve: Serve, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    aotllm.use(FakeManager(says("ok")))
    maker = ManagerMaker(FakeManager(says("ok")))
    monkeypatch.setattr("aotllm.loaded_engine.RuntimeManager", maker)
    flags = ["--kv-cache-memory", "0.5", "--kv-host-memory", "1GiB", "--capacity-policy", "guaranteed_no_evict"]
    flags += ["--queue-policy", "fcfs", "--max-queued-tokens", 9, "--no-prefix-caching", "--speculative", "ngram"]
    assert serve("x", *flags, "--num-speculative-tokens", 3, "--timeout", 7).code == 0
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


def test_adapters_are_served_by_name(
    aotllm: CommandLine, serve: Serve, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("aotllm.adapters.read_adapter", str)
    manager = aotllm.use(FakeManager(says("ok")))
    outcome = serve("x", "--lora", "poet=a/b", "--lora", "cook=c")
    assert (outcome.code, server.models) == (0, ["x", "poet", "cook"])
    assert manager.adapters == {1: "a/b", 2: "c"}


def test_several_engines(aotllm: CommandLine, serve: Serve, server: FakeServer):
    aotllm.use(FakeManager(says("ok")))
    assert serve("x/a", "y/a", "--served-model-name", "b", "--served-model-name", "c").code == 0
    assert server.models == ["b", "c"]
