"""Adapters that come and go at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aotllm import Executor
from aotllm.errors import CheckpointError
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Client

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def client(start: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch) -> Client:
    def read(folder: object) -> str:
        if str(folder) == "missing":
            raise CheckpointError("missing: no adapter_config.json")
        return f"weights of {folder}"

    monkeypatch.setattr("aotllm.adapters.read_adapter", read)
    return Client({"m": start(FakeManager(says("ok")))}, allow_runtime_lora=True)


def names(client: Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_an_adapter_comes_and_goes(client: Client):
    response = client.post(LOAD, {"lora_name": "poet", "lora_path": "folder"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    assert names(client) == ["m", "poet"]
    assert client.post("/v1/completions", {"model": "poet", "prompt": "a"}).json()["model"] == "poet"
    assert client.post(UNLOAD, {"lora_name": "poet"}).status_code == 200
    assert names(client) == ["m"]
    assert client.post("/v1/completions", {"model": "poet", "prompt": "a"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (LOAD, {"lora_name": "poet"}, 400, "lora_path"),
        (LOAD, {"lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_name": "", "lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_name": "m", "lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_name": "bard", "lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_name": "poet", "lora_path": "missing"}, 400, None),
        (LOAD, {"lora_name": "poet", "lora_path": "a\0b"}, 400, "lora_path"),
        (LOAD, {"lora_name": "po\0et", "lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_name": "poet", "lora_path": "a", "base_model_name": "x"}, 404, "model"),
        (LOAD, {"lora_name": "poet", "lora_path": "a", "base_model_name": "bard"}, 400, "base_model_name"),
        (UNLOAD, {"lora_name": "x"}, 404, "lora_name"),
        (UNLOAD, {"lora_name": "m"}, 400, "lora_name"),
    ],
)
def test_what_is_refused(client: Client, path: str, body: dict[str, Any], status: int, param: str | None):
    client.post(LOAD, {"lora_name": "bard", "lora_path": "a"})
    response = client.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert names(client) == ["m", "bard"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_they_are_closed_unless_the_server_was_started_with_them(start: Callable[..., Executor], path: str):
    client = Client({"m": start(FakeManager())})
    response = client.post(path, {"lora_name": "poet", "lora_path": "/etc"})
    assert (response.status_code, response.json()["error"]["type"]) == (403, "PermissionDeniedError")
    assert "--allow-runtime-lora" in response.json()["error"]["message"]
