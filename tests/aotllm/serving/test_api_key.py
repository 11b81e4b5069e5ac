"""With `--api-key`, what is open is listed here; every other route and RPC needs a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask
from tests.aotllm.serving.kserve_server import Serve

OPEN = {
    "GET /health",
    "GET /health_generate",
    "GET /ping",
    "POST /ping",
    "GET /load",
    "GET /version",
    "GET /metrics",
    "GET /openapi.json",
    "GET /",
    "GET /status.json",
    "GET /status/{name}",
    "GET /v2/health/live",
    "GET /v2/health/ready",
    "GET /v2/models/{model:path}/ready",
    "GET /v2/models/{model:path}/versions/{version}/ready",
}
OPEN_RPCS = {"ServerLive", "ServerReady", "ModelReady"}


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """Method and path of all routes of an application."""
    for group in app.routes:
        for route in getattr(group, "routes", [group]):
            yield from ((method, route.path) for method in route.methods)


def filled(path: str) -> str:
    return path.replace("{version}", "1").replace("{model:path}", "m").replace(":path}", "}").replace("{name}", "m")


def test_what_is_open_is_listed(ask: Ask):
    client = ask(FakeManager(says("ok")), api_key=["key"], allow_runtime_lora=True)
    statuses = {
        (method, path): client.request(method, filled(path)).status_code
        for method, path in routes(client.app)
        if method != "HEAD"
    }
    assert len(statuses) > 50
    assert {f"{method} {path}" for (method, path), status in statuses.items() if status != 401} == OPEN


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v1/",
        "/v1/nothing",
        "/v1/health/live",
        "/%761/models",
        "/v1%2Fmodels",
        "/v2/models/m/infer?x=/ready",
        "/v2/models/m/config#/ready",
        "/v2/health",
        "/v2/models/ready/infer",
        "/v2/repository/index/ready",
        "/tokenize/",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"])
def test_other_spellings_open_nothing(ask: Ask, method: str, path: str):
    response = ask(FakeManager(says("ok")), api_key=["key"]).request(method, path)
    assert response.status_code in (401, 404, 405)
    assert b"data" not in response.content


def test_of_the_rpcs_too(kserve: Serve):
    from aotllm.serving.kserve.protocol.messages import SERVICE

    server = kserve(FakeManager(says("ok")), api_key=["key"])
    codes = {}
    with grpc.insecure_channel(server.grpc) as channel:
        for method in SERVICE.methods:
            path = f"/{SERVICE.full_name}/{method.name}"
            try:
                if method.server_streaming:
                    list(channel.stream_stream(path)(iter([b""]), timeout=60))
                else:
                    channel.unary_unary(path)(b"", timeout=60)
                codes[method.name] = grpc.StatusCode.OK
            except grpc.RpcError as error:
                codes[method.name] = error.code()  # type: ignore[attr-defined]
    assert {name for name, code in codes.items() if code is not grpc.StatusCode.UNAUTHENTICATED} == OPEN_RPCS
    assert len(codes) >= 20
