"""Tools over HTTP: what reaches the runtime, what comes back whole and in a stream, what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm import Executor
from aotllm.serving.openai.tools import mistral
from tests.aotllm.byte_tokenizer import END, START
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.grammar_oracle import accepts
from tests.aotllm.serving.http_client import Ask, Client, events
from tests.aotllm.tool_templates import HERMES, LLAMA31, MISTRAL, TemplateEngine

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def tool(name: str, parameters: Any = None, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **others}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("get_weather", CITY, description="The weather"), tool("now")]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def prompt(manager: FakeManager, index: int = 0) -> str:
    """Special tokens aside."""
    return bytes(token for token in manager.submitted[index].prompt_token_ids if token < 256).decode()


def folded(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A stream's choice as its message, put together as the official client does; checks the shape of its deltas."""
    content, calls, reasons = None, [], []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        if delta.get("content"):
            content = (content or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
            else:
                assert call["index"] == len(calls) - 1
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            reasons.append(choice["finish_reason"])
    (reason,) = reasons
    return {"content": content, "calls": calls, "finish_reason": reason}


def outcome(message: dict[str, Any], reason: str) -> dict[str, Any]:
    return {"content": message["content"], "calls": message.get("tool_calls", []), "finish_reason": reason}


ANSWERS: list[tuple[str, str, dict[str, Any], str | None, list[tuple[str, str]], str]] = [
    (HERMES, WEATHER, {}, None, [("get_weather", '{"city": "Rom"}')], "tool_calls"),
    (HERMES, f"Let me see.\n{WEATHER}", {}, "Let me see.", [("get_weather", '{"city": "Rom"}')], "tool_calls"),
    (HERMES, f"{WEATHER}\n{NOW}", {}, None, [("get_weather", '{"city": "Rom"}'), ("now", "{}")], "tool_calls"),
    (
        HERMES,
        f"{WEATHER}\n{NOW}",
        {"parallel_tool_calls": False},
        None,
        [("get_weather", '{"city": "Rom"}')],
        "tool_calls",
    ),
    (HERMES, "It is warm.", {}, "It is warm.", [], "stop"),
    (HERMES, "<tool_call>nonsense", {}, "<tool_call>nonsense", [], "stop"),
    (HERMES, WEATHER, {"max_tokens": 70}, None, [("get_weather", '{"city": "Rom"}')], "length"),
    (HERMES, WEATHER, {"max_tokens": 55}, None, [("get_weather", '{"city')], "length"),
    (HERMES, WEATHER, {"tool_choice": "none"}, WEATHER, [], "stop"),
    (HERMES, '{"city": "Rom"}', {"tool_choice": NAMED}, None, [("get_weather", '{"city": "Rom"}')], "stop"),
    (
        HERMES,
        '[{"name": "get_weather", "parameters": {"city": "Rom"}}, {"name": "now", "parameters": {}}]',
        {"tool_choice": "required"},
        None,
        [("get_weather", '{"city": "Rom"}'), ("now", "{}")],
        "tool_calls",
    ),
    (LLAMA31, '{"name": "now", "parameters": {}}', {}, None, [("now", "{}")], "tool_calls"),
    (MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {}}]', {}, None, [("now", "{}")], "tool_calls"),
    ("{{ messages[0].content }}", '{"name": "now", "parameters": {}}', {}, None, [("now", "{}")], "tool_calls"),
]


@pytest.mark.parametrize(("template", "text", "fields", "content", "calls", "reason"), ANSWERS)
def test_answers(ask: Ask, template: str, text: str, fields: dict[str, Any], content: Any, calls: Any, reason: str):
    client = ask(FakeManager(says(text)), TemplateEngine(template))
    body = {"messages": HI, "tools": TOOLS, **fields}
    choice = client.post(CHAT, body).json()["choices"][0]
    whole = outcome(choice["message"], choice["finish_reason"])
    stream = folded(events(client.post(CHAT, {**body, "stream": True}).text))
    for got in (whole, stream):
        assert (got["content"], got["finish_reason"]) == (content, reason)
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in got["calls"]] == calls
        assert len({call["id"] for call in got["calls"]}) == len(calls)
        assert all(call["type"] == "function" for call in got["calls"])
    assert ("tool_calls" in choice["message"]) == bool(calls)


def test_ids_are_those_that_the_template_takes(ask: Ask):
    body = {"messages": HI, "tools": TOOLS, "tool_choice": NAMED}
    for template, length in ((MISTRAL, 9), (HERMES, len("call_") + 24)):
        answer = ask(FakeManager(says("{}")), TemplateEngine(template)).post(CHAT, body).json()
        assert len(answer["choices"][0]["message"]["tool_calls"][0]["id"]) == length


def test_markers_that_are_special_tokens_are_seen(ask: Ask, monkeypatch: pytest.MonkeyPatch):
    """As [TOOL_CALLS] is in the vocabularies that have it; here the special token is another one."""
    monkeypatch.setattr(mistral, "_START", "<|im_start|>")
    monkeypatch.setattr(mistral.MistralParser, "markers", ("<|im_start|>",))
    manager = FakeManager(lambda _: [*b"So:", START, *b'now{"a": 1}', END])
    client = ask(manager, TemplateEngine(MISTRAL))
    message = client.post(CHAT, {"messages": HI, "tools": TOOLS}).json()["choices"][0]["message"]
    assert message["content"] == "So:"
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}
    plain = client.post(CHAT, {"messages": HI}).json()["choices"][0]["message"]
    assert plain["content"] == 'So:now{"a": 1}'


def test_the_option_chooses_the_parser(ask: Ask):
    body = {"messages": HI, "tools": TOOLS}
    client = ask(FakeManager(says(WEATHER)), TemplateEngine(MISTRAL), tool_call_parser="hermes")
    assert client.post(CHAT, body).json()["choices"][0]["finish_reason"] == "tool_calls"
    client = ask(FakeManager(says("{}")), TemplateEngine(HERMES), tool_call_parser="none")
    error = client.post(CHAT, body).json()["error"]
    assert (error["code"], error["param"]) == (400, "tool_choice")
    assert client.post(CHAT, {**body, "tool_choice": NAMED}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_read_apart(ask: Ask, stream: bool):
    manager = FakeManager(nth_answer=lambda _, index: [WEATHER, "No.", NOW][index].encode())
    response = ask(manager, TemplateEngine(HERMES)).post(
        CHAT, {"messages": HI, "tools": TOOLS, "n": 3, "stream": stream}
    )
    if stream:
        chunks = events(response.text)
        reasons = {
            c["choices"][0]["index"]: c["choices"][0]["finish_reason"]
            for c in chunks
            if c["choices"][0]["finish_reason"]
        }
    else:
        reasons = {choice["index"]: choice["finish_reason"] for choice in response.json()["choices"]}
    assert reasons == {0: "tool_calls", 1: "stop", 2: "tool_calls"}


def test_streamed_logprobs_are_complete_although_markup_is_hidden(ask: Ask):
    client = ask(FakeManager(says(WEATHER)), TemplateEngine(HERMES))
    body = {"messages": HI, "tools": TOOLS, "logprobs": True}
    whole = client.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    parts = [c["choices"][0]["logprobs"] for c in events(client.post(CHAT, {**body, "stream": True}).text)]
    assert [entry for part in parts if part for entry in part["content"]] == whole
    assert len(whole) == len(WEATHER) + 1


# What the model is told ----------------------------------------------------------------------------------------------


def test_tools_reach_the_template(ask: Ask):
    manager = FakeManager(says("ok"))
    client = ask(manager, TemplateEngine("{{ tools | tojson }}{{ messages | tojson }}"))
    client.post(CHAT, {"messages": HI, "tools": [tool("f", CITY, strict=True, description=None), tool("now")]})
    tools = json.loads(prompt(manager).removesuffix(json.dumps(HI)))
    assert tools == [tool("f", CITY), tool("now", {"type": "object", "properties": {}})]


def test_tools_are_not_shown_where_they_may_not_be_called(ask: Ask):
    manager = FakeManager(says("ok"))
    client = ask(manager, TemplateEngine(HERMES))
    client.post(CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "none"})
    client.post(CHAT, {"messages": HI})
    assert prompt(manager, 0) == prompt(manager, 1)


def test_a_whole_conversation(ask: Ask):
    manager = FakeManager(says("ok"))
    conversation = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rom"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "22"},
    ]
    assert ask(manager, TemplateEngine(HERMES)).post(CHAT, {"messages": conversation}).status_code == 200
    assert prompt(manager) == (
        "user\nhi\n"
        'assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
        "user\n<tool_response>\n22\n</tool_response>\n"
        "assistant\n"
    )


def test_a_template_without_tools_has_them_in_words(ask: Ask):
    manager = FakeManager(says("ok"))
    ask(manager).post(CHAT, {"messages": HI, "tools": TOOLS})
    assert prompt(manager).startswith("system\nYou can call functions.")
    assert '"get_weather"' in prompt(manager)


# What the answer is held to ------------------------------------------------------------------------------------------

NESTED = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Place"}, "next": {"$ref": "#"}},
    "required": ["at"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}}}

HELD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"tools": TOOLS, "tool_choice": "required"},
        [
            '[{"name": "now", "parameters": {}}]',
            '[{"name": "get_weather", "parameters": {"city": "Rom"}}, {"name": "now", "parameters": {}}]',
        ],
        [
            "[]",
            "It is warm.",
            '[{"name": "other", "parameters": {}}]',
            '[{"name": "get_weather", "parameters": {}}]',
            '[{"name": "now", "parameters": {"more": 1}}]',
        ],
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        ['[{"name": "now", "parameters": {}}]'],
        ['[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}]'],
    ),
    (
        {"tools": TOOLS, "tool_choice": NAMED},
        ['{"city": "Rom"}'],
        ["{}", '{"city": 5}', '{"city": "Rom", "country": "Italy"}', '[{"name": "now", "parameters": {}}]'],
    ),
    (
        {"tools": [tool("f", NESTED)], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ['{"at": {"x": 1}}', '{"at": {"x": 1}, "next": {"at": {"x": 2}}}'],
        ['{"at": {}}'],
    ),
    (
        {"tools": [*TOOLS, tool("f", NESTED)], "tool_choice": "required"},
        ['[{"name": "f", "parameters": {"at": {"x": 1}, "next": {"at": {"x": 2}}}}]'],
        ['[{"name": "f", "parameters": {"at": 1}}]'],
    ),
    (
        {
            "tools": [tool("f", {"type": "object", "additionalProperties": {"type": "integer"}})],
            "tool_choice": "required",
        },
        ['[{"name": "f", "parameters": {"a": 1}}]'],
        ['[{"name": "f", "parameters": {"a": "b"}}]'],
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        },
        ['[{"name": "get_weather", "parameters": {"city": "Rom"}}]'],
        ['[{"name": "now", "parameters": {}}]'],
    ),
    # With a form for the text the answer is either a call or that.
    (
        {"tools": TOOLS, "response_format": FORM},
        ['{"a": 1}', '{"name": "now", "parameters": {}}'],
        ["It is warm.", '{"name": "now"}', '{"name": "other", "parameters": {}}'],
    ),
    # Where a call is required, there is no text to have a form.
    (
        {"tools": TOOLS, "tool_choice": "required", "response_format": FORM},
        ['[{"name": "now", "parameters": {}}]'],
        ['{"a": 1}'],
    ),
    ({"tools": TOOLS, "tool_choice": "none", "response_format": FORM}, ['{"a": 1}'], ["It is warm."]),
]


@pytest.mark.parametrize(("fields", "yes", "no"), HELD)
def test_the_answer_is_held_to_a_call(ask: Ask, fields: dict[str, Any], yes: list[str], no: list[str]):
    manager = FakeManager(says(yes[0]))
    response = ask(manager, TemplateEngine(HERMES)).post(CHAT, {"messages": HI, **fields})
    assert response.status_code == 200, response.text
    constraint = manager.submitted[0].constraint
    assert [text for text in yes if not accepts(constraint, text)] == []
    assert [text for text in no if accepts(constraint, text)] == []


def test_auto_is_free(ask: Ask):
    manager = FakeManager(says("ok"))
    ask(manager, TemplateEngine(HERMES)).post(CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "auto"})
    assert manager.submitted[0].constraint is None


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [('{"a": 1}', '{"a": 1}', 0), ('{"name": "now", "parameters": {}}', None, 1)],
)
def test_either_a_call_or_the_form(ask: Ask, text: str, content: str | None, calls: int):
    client = ask(FakeManager(says(text)), TemplateEngine(HERMES))
    message = client.post(CHAT, {"messages": HI, "tools": TOOLS, "response_format": FORM}).json()["choices"][0][
        "message"
    ]
    assert (message["content"], len(message.get("tool_calls", []))) == (content, calls)


# What is refused -----------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": ["f"]}, "tools"),
    ({"tools": [{}]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
    ({"tools": [tool("")]}, "tools"),
    ({"tools": [tool("a b")]}, "tools"),
    ({"tools": [tool("f\n")]}, "tools"),
    ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools"),
    ({"tools": [tool("f", description=5)]}, "tools"),
    ({"tools": [tool("f"), tool("f")]}, "tools"),
    *(
        ({"tools": [tool("f", schema)]}, "tools")
        for schema in (
            5,
            "{}",
            [],
            True,
            {"type": "string"},
            {"type": "obj"},
            {"type": ["object", "nope"]},
            {"properties": []},
            {"properties": {"a": 5}},
            {"properties": {"a": {"type": "float"}}},
            {"properties": {"a": {"items": {"type": "nope"}}}},
            {"properties": {"a": {"anyOf": {"type": "string"}}}},
            {"properties": {"a": {"anyOf": [{"type": 5}]}}},
            {"required": "a"},
            {"required": [1]},
            {"properties": {"a": {"enum": "b"}}},
            {"properties": {"a": {"$ref": 5}}},
            {"$defs": [1]},
        )
    ),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "now"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [{"type": "function", "function": {"name": "unknown"}}]},
            },
        },
        "tool_choice",
    ),
    ({"tools": [tool("f", {"properties": {"a": {"$ref": "#/nowhere"}}})], "tool_choice": "required"}, "tools"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"tools": TOOLS, "parallel_tool_calls": "perhaps"}, "parallel_tool_calls"),
    ({"tools": TOOLS, "use_beam_search": True}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_refusals(ask: Ask, fields: dict[str, Any], param: str):
    manager = FakeManager(says("ok"))
    response = ask(manager, TemplateEngine(HERMES)).post(CHAT, {"messages": HI, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert manager.submitted == []


def test_the_former_api_says_what_to_send_instead(ask: Ask):
    response = ask(FakeManager()).post(CHAT, {"messages": HI, "functions": [{"name": "f"}]})
    assert "as tools" in response.json()["error"]["message"]


@pytest.mark.parametrize("depth", [60, 200])
@pytest.mark.parametrize("template", [HERMES, "{{ messages[0].content }}"])
def test_what_is_nested_for_ever_is_refused(ask: Ask, template: str, depth: int):
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    client = ask(FakeManager(says("ok")), TemplateEngine(template))
    call = {"type": "function", "function": {"name": "f", "arguments": value}}
    history = [*HI, {"role": "assistant", "tool_calls": [call]}]
    for fields, param in (
        ({"tools": [tool("f", value)]}, "tools"),
        ({"tools": [tool("f", {"default": value})], "tool_choice": "required"}, "tools"),
        ({"messages": history}, "messages"),
    ):
        error = client.post(CHAT, {"messages": HI, **fields}).json()["error"]
        assert (error["code"], error["param"]) == (400, param)
        assert "nested too deeply" in error["message"]


WORDS = st.sampled_from(
    [
        *("type", "function", "name", "description", "parameters", "properties", "required", "items", "anyOf", "enum"),
        *("$ref", "$defs", "additionalProperties", "arguments", "tool_calls", "role", "content", "id", "tool_call_id"),
        *("mode", "tools", "allowed_tools"),
    ]
)
SCALARS = st.sampled_from(["function", "object", "string", "f", "#", "#/$defs/a", "{}", "", "tool", "assistant"])
NOISE = st.recursive(
    SCALARS | st.none() | st.booleans() | st.integers(-1, 2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
SCHEMA = st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(st.text(max_size=3), NOISE)})


@settings(deadline=None, max_examples=100)
@given(
    tools=st.lists(st.builds(tool, st.sampled_from("fgh"), NOISE | SCHEMA), min_size=1, max_size=3) | NOISE,
    choice=st.sampled_from(["auto", "required", "none", {"type": "function", "function": {"name": "f"}}]) | NOISE,
    message=st.dictionaries(WORDS, NOISE, max_size=4),
    template=st.sampled_from([HERMES, LLAMA31, MISTRAL, "{{ messages }}"]),
)
def test_no_body_is_a_fault_of_the_server(tools: Any, choice: Any, message: Any, template: str):
    manager = FakeManager(says(WEATHER))
    with Executor(TemplateEngine(template), manager_factory=lambda *_: manager) as executor:
        body = {"messages": [*HI, {"role": "assistant", **message}], "tools": tools, "tool_choice": choice}
        response = Client({"m": executor}).post(CHAT, body)
    assert response.status_code in (200, 400), response.text
