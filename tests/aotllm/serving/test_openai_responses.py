"""`/v1/responses`: shapes that the official client accepts, conversations that go on, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from aotllm.errors import Internal
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.grammar_oracle import accepts
from tests.aotllm.serving.http_client import Ask

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def prompt_of(manager: FakeManager, number: int = -1) -> str:
    ids = manager.submitted[number].prompt_token_ids
    return bytes(token_id for token_id in ids if token_id < 256).decode()


def typed_events(text: str) -> list[dict[str, Any]]:
    """Their data; each says its type twice, and all have the shapes of the official client."""
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        kind, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
    assert [entry["sequence_number"] for entry in found] == list(range(len(found)))
    return found


def test_an_answer(ask: Ask):
    manager = FakeManager(says("né"), num_cached_tokens=2)
    body = ask(manager).post(PATH, {"model": "m", "input": "hi", "metadata": {"a": "b"}, "temperature": 0.5}).json()
    response = Response.model_validate(body)
    assert (response.output_text, response.status, response.model) == ("né", "completed", "m")
    assert (response.metadata, response.temperature, response.store) == ({"a": "b"}, 0.5, True)
    assert response.usage is not None
    prompt_tokens = len(manager.submitted[0].prompt_token_ids)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (prompt_tokens, 4)
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.total_tokens == prompt_tokens + 4
    assert prompt_of(manager) == "user\nhi\nassistant\n"


def test_the_events_of_a_stream(ask: Ask):
    manager = FakeManager(says("né"), stepping="by hand")
    streamed = ask(manager).post_in_steps(manager, PATH, {"input": "hi", "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    found = typed_events(streamed.text)
    assert [entry["type"] for entry in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [entry["delta"] for entry in found if "delta" in entry] == ["n", "é"]
    whole = found[-1]["response"]
    assert whole["output"][0]["content"][0]["text"] == "né"
    assert whole["output"][0] == found[-2]["item"]
    assert {entry["item_id"] for entry in found if "item_id" in entry} == {whole["output"][0]["id"]}
    assert {entry["response"]["id"] for entry in found if "response" in entry} == {whole["id"]}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_is_incomplete(ask: Ask, stream: bool):
    text = ask(FakeManager(says("sea"))).post(PATH, {"input": "hi", "max_output_tokens": 2, "stream": stream}).text
    if stream:
        last = typed_events(text)[-1]
        assert last["type"] == "response.incomplete"
    body = last["response"] if stream else json.loads(text)
    response = Response.model_validate(body)
    assert (response.status, response.output_text) == ("incomplete", "se")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_failure_is_the_last_event(ask: Ask):
    text = ask(FakeManager(lambda _: [97, Internal("KV pool lost")])).post(PATH, {"input": "hi", "stream": True}).text
    last = typed_events(text)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "KV pool lost"}


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("hi", "user\nhi\n"),
        ([{"role": "user", "content": "hi"}], "user\nhi\n"),
        ([{"role": "developer", "content": "be"}, {"type": "message", "role": "user", "content": "hi"}],
         "system\nbe\nuser\nhi\n"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]}],
         "user\nhi\n"),
        ([{"role": "user", "content": "a"},
          {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
           "content": [{"type": "output_text", "text": "b", "annotations": []}]},
          {"role": "user", "content": "c"}], "user\na\nassistant\nb\nuser\nc\n"),
    ],
)  # fmt: skip
def test_kinds_of_input(ask: Ask, given: object, prompt: str):
    manager = FakeManager(says("ok"))
    assert ask(manager).post(PATH, {"input": given}).status_code == 200
    assert prompt_of(manager) == prompt + "assistant\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_without_the_instructions(ask: Ask, stream: bool):
    manager = FakeManager(says("yes"))
    client = ask(manager)
    response = client.post(PATH, {"input": "one", "instructions": "be brief", "stream": stream})
    first = typed_events(response.text)[-1]["response"] if stream else response.json()
    assert prompt_of(manager) == "system\nbe brief\nuser\none\nassistant\n"
    second = client.post(PATH, {"input": "two", "previous_response_id": first["id"]}).json()
    assert second["previous_response_id"] == first["id"]
    assert prompt_of(manager) == "user\none\nassistant\nyes\nuser\ntwo\nassistant\n"
    third = {"input": "three", "previous_response_id": second["id"], "instructions": "rhyme"}
    assert client.post(PATH, third).status_code == 200
    assert prompt_of(manager).startswith("system\nrhyme\nuser\none\nassistant\nyes\nuser\ntwo\nassistant\nyes\nuser\n")


def test_answers_can_be_had_again_and_deleted(ask: Ask):
    client = ask(FakeManager(says("ok")))
    body = client.post(PATH, {"input": "hi"}).json()
    path = f"{PATH}/{body['id']}"
    assert client.get(path).json() == body
    assert client.request("DELETE", path).json() == {"id": body["id"], "object": "response", "deleted": True}
    for response in (client.get(path), client.request("DELETE", path)):
        assert (response.status_code, response.json()["error"]["param"]) == (404, "response_id")


@pytest.mark.parametrize(("options", "fields"), [({"max_stored_responses": 0}, {}), ({}, {"store": False})])
def test_answers_that_are_not_stored_cannot_be_gone_on_from(ask: Ask, options: dict[str, int], fields: dict[str, bool]):
    manager = FakeManager(says("ok"))
    client = ask(manager, **options)
    first = client.post(PATH, {"input": "hi", **fields}).json()
    response = client.post(PATH, {"input": "hi", "previous_response_id": first["id"]})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "previous_response_id")
    assert first["id"] in response.json()["error"]["message"]
    assert len(manager.submitted) == 1


def test_the_latest_answers_are_kept(ask: Ask):
    client = ask(FakeManager(says("ok")), max_stored_responses=2)
    ids = [client.post(PATH, {"input": "hi"}).json()["id"] for _ in range(4)]
    assert [client.get(f"{PATH}/{name}").status_code for name in ids] == [404, 404, 200, 200]


def test_what_is_kept_is_bounded_in_bytes(ask: Ask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("aotllm.serving.openai.response_store.MAX_BYTES", 5000)
    client = ask(FakeManager(says("ok")))
    ids = [client.post(PATH, {"input": "x" * 1500}).json()["id"] for _ in range(3)]
    assert [client.get(f"{PATH}/{name}").status_code for name in ids] == [404, 200, 200]
    huge = client.post(PATH, {"input": "x" * 3900}).json()["id"]
    assert [client.get(f"{PATH}/{name}").status_code for name in [*ids, huge]] == [404, 404, 404, 200]


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_the_form_of_the_text(ask: Ask, kind: str):
    manager = FakeManager(says("ok"))
    described = {"type": kind} | ({"name": "a", "schema": SCHEMA} if kind == "json_schema" else {})
    body = ask(manager).post(PATH, {"input": "hi", "text": {"format": described}}).json()
    assert body["text"]["format"] == described
    constraint = manager.submitted[0].constraint
    assert (accepts(constraint, '{"a":1}'), accepts(constraint, "[]")) == (True, False)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(ask: Ask, stream: bool):
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1, "stream": stream}
    text = ask(FakeManager(says("é"))).post(PATH, {**body, "max_output_tokens": 1}).text
    if stream:
        whole = typed_events(text)[-1]["response"]
        deltas = [entry["logprobs"] for entry in typed_events(text) if entry["type"].endswith("delta")]
        assert [entry for delta in deltas for entry in delta] == whole["output"][0]["content"][0]["logprobs"]
    else:
        whole = json.loads(text)
    token = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}
    assert whole["output"][0]["content"][0]["logprobs"] == [{**token, "top_logprobs": [token]}]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["hi"]}, "input"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input"),
    ({"input": [{"role": "user", "content": 3}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
    ({"input": "a", "tools": [{"type": "function", "name": "f"}]}, "tools"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "truncation": "auto"}, "truncation"),
    ({"input": "a", "conversation": "c"}, "conversation"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "a", "n": 2}, "n"),
    ({"input": "a", "max_tokens": 2}, "max_tokens"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "max_output_tokens": 10**9}, "max_output_tokens"),
    ({"input": "a", "top_logprobs": 21}, "top_logprobs"),
    ({"input": "a", "temperature": -1}, "temperature"),
    ({"input": "a", "metadata": {"a": 1}}, "metadata"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format"),
    ({"input": "a", "text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ({"input": "\ud800"}, "input"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_bad_requests(ask: Ask, body: dict[str, Any], param: str):
    manager = FakeManager(says("ok"))
    response = ask(manager).request(
        "POST", PATH, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert manager.submitted == []
