"""No body is a fault of the server: arbitrary values in known fields are answered or refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm import Executor
from aotllm.serving.openai.protocol import UNSUPPORTED, ChatCompletionRequest, CompletionRequest
from tests.aotllm.fake_manager import FakeEngine, FakeManager, says
from tests.aotllm.serving.http_client import Client

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=6,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.text(max_size=4), "content": VALUES}), min_size=1, max_size=2)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    manager = FakeManager(says("ok"))
    with Executor(FakeEngine(), manager_factory=lambda *_: manager) as executor:
        yield Client({"m": executor})


def bodies(model: type, **good: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    """Good values for what is needed, anything for a few of the others."""
    names = sorted({*model.model_fields, *UNSUPPORTED} - {"model", *good})
    noise = st.dictionaries(st.sampled_from(names), VALUES, max_size=3)
    return st.builds(lambda needed, others: others | needed, st.fixed_dictionaries(good), noise)


@settings(deadline=None, max_examples=150)
@given(body=bodies(ChatCompletionRequest, messages=MESSAGES | VALUES))
def test_chat(client: Client, body: dict[str, object]):
    check(client, "/v1/chat/completions", body)


@settings(deadline=None, max_examples=150)
@given(body=bodies(CompletionRequest, prompt=st.text(max_size=5) | VALUES))
def test_completions(client: Client, body: dict[str, object]):
    check(client, "/v1/completions", body)


def check(client: Client, path: str, body: dict[str, object]) -> None:
    response = client.post(path, body)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]
