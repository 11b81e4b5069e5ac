"""What chat templates get to see of a conversation with tools."""

from __future__ import annotations

from typing import Any

import pytest

from aotllm.errors import InvalidRequest
from aotllm.serving.openai.tools.definitions import tool_use
from aotllm.serving.openai.tools.instructions import described_in_words
from aotllm.serving.openai.tools.messages import template_messages

Messages = list[dict[str, Any]]


def call(arguments: Any, identity: Any = "1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "f", "arguments": arguments}}


def seen(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


CASES: list[tuple[Messages, str, Messages]] = [
    ([{"role": "user", "content": None}], "", [{"role": "user", "content": ""}]),
    ([{"role": "user", "content": "a", "name": None}], "", [{"role": "user", "content": "a"}]),
    ([{"role": "developer", "content": "a"}], "", [{"role": "system", "content": "a"}]),
    ([{"role": "developer", "content": "a"}], "'developer'", [{"role": "developer", "content": "a"}]),
    (
        [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}],
        "",
        [{"role": "assistant", "content": "ab"}],
    ),
    (
        [{"role": "assistant", "content": "a", "tool_calls": [], "function_call": None, "refusal": None}],
        "",
        [{"role": "assistant", "content": "a"}],
    ),
    (
        [{"role": "assistant", "content": "a", "reasoning": "r"}],
        "",
        [{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}],
    ),
    *(
        (
            [{"role": "assistant", "content": None, "tool_calls": [call(written)]}],
            "",
            [{"role": "assistant", "content": "", "tool_calls": [seen(arguments)]}],
        )
        for written, arguments in [
            ('{"a": [1, "é"]}', {"a": [1, "é"]}),
            ({"a": 1}, {"a": 1}),
            ("{}", {}),
            ("", {}),
            (None, {}),
        ]
    ),
    (
        [{"role": "assistant", "tool_calls": [call("{}")]}],
        "{% if message['content'] is none %}",
        [{"role": "assistant", "content": None, "tool_calls": [seen({})]}],
    ),
    (
        [{"role": "assistant", "tool_calls": [call("{}")]}, {"role": "tool", "tool_call_id": "1", "content": "x"}],
        "",
        [
            {"role": "assistant", "content": "", "tool_calls": [seen({})]},
            {"role": "tool", "tool_call_id": "1", "content": "x", "name": "f"},
        ],
    ),
]


@pytest.mark.parametrize(("messages", "template", "expected"), CASES)
def test_messages(messages: Messages, template: str, expected: Messages):
    assert template_messages(messages, template) == expected


BAD: list[tuple[dict[str, Any], str]] = [
    ({"role": "assistant", "tool_calls": [call("{")]}, r"messages\[0\].tool_calls\[0\].function.arguments is not JSON"),
    ({"role": "assistant", "tool_calls": [call("[1]")]}, "must be a JSON object"),
    ({"role": "assistant", "tool_calls": [call("[" * 100_000)]}, "not JSON"),
    ({"role": "assistant", "tool_calls": [call("{}", 5)]}, "id must be a string"),
    ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, r"tool_calls\[0\] must be"),
    ({"role": "assistant", "tool_calls": ["f"]}, r"tool_calls\[0\] must be"),
    ({"role": "assistant", "tool_calls": {"a": 1}}, "must be a list"),
    ({"role": "assistant", "tool_calls": ""}, "must be a list"),
    ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "former API"),
    ({"role": "function", "name": "f", "content": "x"}, "former API"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "only text parts"),
    ({"role": 5}, "role must be a string"),
]


@pytest.mark.parametrize(("message", "why"), BAD)
def test_bad_messages_say_where(message: dict[str, Any], why: str):
    with pytest.raises(InvalidRequest, match=why) as caught:
        template_messages([message], None)
    assert caught.value.param == "messages"


TOOL = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}}}
TOLD = (
    "You can call functions. They are, as JSON:\n"
    '{"name": "f", "description": "does f", "parameters": {"type": "object"}}\n'
    'To call one, answer with {"name": <name of the function>, "parameters": <object of its arguments>} and nothing '
    "else. Call one only where it helps; otherwise answer as usual."
)
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "template", "expected"),
    [
        ([USER], "", [{"role": "system", "content": TOLD}, USER]),
        (
            [{"role": "system", "content": "Be brief."}, USER],
            "",
            [{"role": "system", "content": f"Be brief.\n\n{TOLD}"}, USER],
        ),
        ([USER], "raise_exception('System role not supported')", [{"role": "user", "content": f"{TOLD}\n\nhi"}]),
    ],
)
def test_a_template_without_tools_is_told_in_words(messages: Messages, template: str, expected: Messages):
    assert described_in_words(messages, tool_use([TOOL], None, None), template) == expected


def test_calls_and_results_as_words():
    messages = [
        USER,
        {"role": "assistant", "content": "Hm.", "tool_calls": [seen({"a": 1}), seen({})]},
        {"role": "tool", "name": "f", "content": "x"},
        {"role": "tool", "content": "y"},
    ]
    assert described_in_words(messages, None, "") == [
        USER,
        {
            "role": "assistant",
            "content": 'Hm.\n{"name": "f", "parameters": {"a": 1}}\n{"name": "f", "parameters": {}}',
        },
        {"role": "user", "content": "Result of f: x\nResult of the function: y"},
    ]
