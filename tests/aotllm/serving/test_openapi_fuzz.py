"""The app against its own OpenAPI document: whatever the document allows, or forbids, is no fault of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from aotllm import Executor
from aotllm.serving import app_of
from tests.aotllm.fake_manager import FakeEngine, FakeManager, says
from tests.aotllm.serving.http_client import Client

_DOCUMENT = Client({"m": None}).get("/openapi.json").json()
OPERATIONS = [(method, path) for path, item in _DOCUMENT["paths"].items() for method in item]


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    manager = FakeManager(says("ok"), max_seq_len=64)
    with Executor(FakeEngine(), manager_factory=lambda *_: manager) as executor:
        app = app_of({"m": executor}, allow_runtime_lora=True)
        yield schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_no_call_is_a_fault_of_the_server(schema: Any, method: str, path: str, mode: GenerationMode):
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        pytest.skip("nothing can be wrong with it")

    @settings(
        max_examples=20,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call()
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code in (400, 404):
            assert response.json()["error"]["message"]

    check()
