"""Fields that give an answer its form: what reaches the runtime, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.grammar_oracle import accepts
from tests.aotllm.serving.conftest import Ask

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}

FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": RESPONSE_FORMAT}, '{"a":1}', "{}"),
    ({"response_format": {"type": "json_object"}}, "{}", "[]"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a":1}', "{}"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a":1}', "{}"),
    ({"structured_outputs": {"json": '{"type": "null"}'}}, "null", "1"),
    ({"structured_outputs": {"json_object": True, "regex": None}}, "{}", "[]"),
    ({"structured_outputs": {"regex": "a+", "disable_fallback": False}}, "aa", "b"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
    ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, "aab", "aa"),
    ({"guided_json": SCHEMA}, '{"a":1}', "{}"),
    ({"guided_regex": "a+"}, "aa", "b"),
    ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ({"guided_grammar": 'start: "a" start | "b"'}, "aab", "aa"),
    ({"guided_regex": "a+", "response_format": {"type": "text"}}, "aa", "b"),
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"guided_json": 7}, "guided_json"),
    ({"guided_regex": "[^"}, "guided_regex"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_grammar": "hello"}, "guided_grammar"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "yes", "no"), FORMS)
def test_the_form_reaches_the_runtime(ask: Ask, path: str, fields: dict[str, Any], yes: str, no: str):
    manager = FakeManager(says("ok"))
    assert ask(manager).post(path, {**BODIES[path], **fields}).status_code == 200
    constraint = manager.submitted[0].constraint
    assert constraint is not None
    assert (accepts(constraint, yes), accepts(constraint, no)) == (True, False)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_free_text_has_none(ask: Ask, path: str, fields: dict[str, Any]):
    manager = FakeManager(says("ok"))
    assert ask(manager).post(path, {**BODIES[path], **fields}).status_code == 200
    assert manager.submitted[0].constraint is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_does_not_compile_is_refused_before_it_is_queued(ask: Ask, path: str, fields: dict[str, Any], param: str):
    manager = FakeManager(says("ok"))
    response = ask(manager).post(path, {**BODIES[path], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert manager.submitted == []


def test_all_choices_of_a_request_have_the_form(ask: Ask):
    manager = FakeManager(says("ok"))
    ask(manager).post(TEXT, {"prompt": ["a", "b"], "n": 2, "guided_regex": "a"})
    assert [accepts(request.constraint, "a") for request in manager.submitted] == [True] * 2
    assert [request.n for request in manager.submitted] == [2, 2]
