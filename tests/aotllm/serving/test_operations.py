"""Health, load, request ids, CORS, keys: what those who run a server look at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from aotllm import Executor, Request
from aotllm.errors import Internal
from aotllm.request_handle import SilentListener
from aotllm.serving.app import create_app
from aotllm.serving.call import Call
from aotllm.serving.context import ServingContext
from aotllm.serving.repository import LocalRepository
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask, Client

DEEP = ["/health?deep", "/health?deep=1", "/health_generate"]


@pytest.mark.parametrize("path", DEEP)
def test_a_deep_probe_generates_a_token_on_every_engine(start: Callable[..., Executor], path: str):
    managers = [FakeManager(says("ok")), FakeManager(says("ok"))]
    client = Client({str(number): start(manager) for number, manager in enumerate(managers)})
    assert client.get(path).status_code == 200
    assert [[r.sampling.max_tokens for r in manager.submitted] for manager in managers] == [[1], [1]]


@pytest.mark.parametrize("path", ["/health", "/health?deep=0", "/health?deep=false", "/ping"])
def test_a_shallow_one_does_not(ask: Ask, path: str):
    manager = FakeManager(says("ok"))
    assert ask(manager).get(path).status_code == 200
    assert manager.submitted == []


@pytest.mark.parametrize("path", [*DEEP, "/health", "/ping"])
def test_a_dead_engine_is_seen_by_all(start: Callable[..., Executor], path: str):
    executor = start(FakeManager(says("ok")))
    client = Client({"m": executor})
    executor.shutdown()
    assert client.get(path).status_code == 503


@pytest.mark.parametrize("path", DEEP)
@pytest.mark.parametrize(
    "make",
    [lambda: FakeManager(lambda _: [Internal("no memory")]), lambda: FakeManager(max_queue_size=0)],
    ids=["fails", "full"],
)
def test_an_engine_that_gives_no_token_is_not_well(ask: Ask, make: Callable[[], FakeManager], path: str):
    assert ask(make()).get(path).status_code == 503


@pytest.mark.parametrize("path", DEEP)
def test_an_engine_that_hangs_is_not_well(ask: Ask, monkeypatch: pytest.MonkeyPatch, path: str):
    monkeypatch.setattr("aotllm.serving.operations.PROBE_SECONDS", 0.01)
    manager = FakeManager(says("ok"), stepping="by hand")
    assert ask(manager).get(path).status_code == 503
    manager.wait_until(lambda m: not m.running)


def test_probes_at_the_same_time_share_one_token(ask: Ask):
    manager = FakeManager(says("ok"), stepping="by hand")
    client = ask(manager)

    async def probes() -> list[int]:
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            asked = [asyncio.create_task(http.get("/health_generate")) for _ in range(5)]
            await asyncio.to_thread(manager.wait_until, lambda m: m.running)
            for _ in range(20):
                await asyncio.sleep(0)
            manager.step()
            return [(await response).status_code for response in asked]

    assert asyncio.run(probes()) == [200] * 5
    assert len(manager.submitted) == 1


def test_load_counts_what_runs_and_waits(ask: Ask):
    manager = FakeManager(says("ok"), stepping="by hand")
    client = ask(manager)
    assert client.get("/load").json() == {"server_load": 0}
    executor = client.executors["m"]
    handles = [executor.submit("a") for _ in range(3)]
    assert client.get("/load").json() == {"server_load": 3}
    for handle in handles:
        handle.cancel()


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1", True), (None, False), ("", False), ("two words", False), ("x" * 129, False), ("x" * 128, True)],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nope"])
def test_request_ids(ask: Ask, path: str, given: str | None, kept: bool):
    headers = {} if given is None else {"X-Request-Id": given}
    got = ask(FakeManager()).get(path, headers=headers).headers["x-request-id"]
    assert (got == given) is kept
    assert kept or (len(got) == 32 and int(got, 16) >= 0)


def test_request_ids_of_faults_streams_and_refusals(ask: Ask):
    headers = {"X-Request-Id": "mine"}
    guarded = ask(FakeManager(says("ok")), api_key=("key",))
    assert guarded.get("/v1/models", headers=headers).headers["x-request-id"] == "mine"
    manager = FakeManager(says("ok"))
    client = ask(manager)
    body = {"prompt": "a", "stream": True}
    assert client.post("/v1/completions", body, headers=headers).headers["x-request-id"] == "mine"
    manager.submit = lambda request: 1 / 0
    fault = client.post("/v1/completions", {"prompt": "a"}, headers=headers)
    assert (fault.status_code, fault.headers["x-request-id"]) == (500, "mine")


def test_calls_have_the_id_that_the_client_sees(start: Callable[..., Executor]):
    seen: list[str] = []

    class Telemetry:
        def begin(self, call: Call, request: Request) -> SilentListener:
            seen.append(call.request_id)
            return SilentListener()

    executors = {"m": start(FakeManager(says("ok")))}
    client = Client(executors)
    client.app = create_app(ServingContext(LocalRepository(executors), telemetry=Telemetry()))
    made = client.post("/v1/completions", {"prompt": "a"}).headers["x-request-id"]
    client.post("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "mine"})
    assert seen == [made, "mine"]


ORIGIN = "https://example.org"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


@pytest.mark.parametrize(
    ("options", "origin", "allowed"),
    [
        ({}, ORIGIN, None),
        ({"allowed_origins": (ORIGIN,)}, ORIGIN, ORIGIN),
        ({"allowed_origins": (ORIGIN,)}, "https://evil.example", None),
        ({"allowed_origins": ("*",)}, ORIGIN, "*"),
    ],
)
def test_cors(ask: Ask, options: dict[str, tuple[str, ...]], origin: str, allowed: str | None):
    client = ask(FakeManager(says("ok")), api_key=("key",), **options)
    preflight = client.request("OPTIONS", "/v1/chat/completions", headers={**PREFLIGHT, "Origin": origin})
    assert preflight.headers.get("access-control-allow-origin") == allowed
    assert (preflight.status_code == 200) is (allowed is not None)
    # Of a refusal, too: a page could not even read why.
    refused = client.get("/v1/models", headers={"Origin": origin})
    assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (401, allowed)


def test_cors_can_be_narrowed(ask: Ask):
    options = {"allowed_origins": (ORIGIN,), "allowed_methods": ("GET",), "allowed_headers": ("x-a",)}
    client = ask(FakeManager(), allow_credentials=True, **options)
    assert client.request("OPTIONS", "/v1/models", headers=PREFLIGHT).status_code == 400
    narrow = {"Origin": ORIGIN, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-a"}
    preflight = client.request("OPTIONS", "/v1/models", headers=narrow)
    assert (preflight.status_code, preflight.headers["access-control-allow-credentials"]) == (200, "true")


@pytest.mark.parametrize(
    ("path", "guarded"),
    [
        ("/v1/models", True),
        ("/v1/responses/x", True),
        ("/v1/load_lora_adapter", True),
        ("/v2/models/m", True),
        ("/v2/repository/index", True),
        ("/tokenize", True),
        ("/detokenize", True),
        ("/v2/health/live", False),
        ("/health", False),
        ("/metrics", False),
        ("/ping", False),
        ("/load", False),
        ("/version", False),
    ],
)
def test_which_paths_need_a_key(ask: Ask, path: str, guarded: bool):
    client = ask(FakeManager(says("ok")), api_key=("key",))
    response = client.get(path)
    assert (response.status_code == 401) is guarded
    if guarded:
        assert (response.json(), response.headers["www-authenticate"]) == ({"error": "Unauthorized"}, "Bearer")
    assert client.get(path, headers={"Authorization": "Bearer key"}).status_code != 401
