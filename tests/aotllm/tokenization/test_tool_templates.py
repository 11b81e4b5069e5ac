"""Templates with tools: equal to transformers' rendering, and messages left open to be continued."""

from __future__ import annotations

from typing import Any

import pytest

from aotllm.errors import InvalidRequest
from aotllm.serving.openai.tools.messages import template_messages
from aotllm.tokenization import ChatTemplate
from tests.aotllm.byte_tokenizer import byte_tokenizer
from tests.aotllm.tool_templates import HERMES, LLAMA31, MISTRAL, THINKING

TEMPLATES = {"hermes": HERMES, "thinking": THINKING, "llama3.1": LLAMA31, "mistral": MISTRAL}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather, <now> & later",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "São Paulo", "days": [1, 2]}'},
}
USER = {"role": "user", "content": " Weather? "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "result": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "22 °C"},
    ],
    "went on": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL], "refusal": None, "function_call": None},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": [{"type": "text", "text": '{"t": 22}'}]},
        {"role": "assistant", "content": "It is 22 °C.", "tool_calls": None},
        {"role": "user", "content": "Thanks."},
    ],
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_rendering_is_that_of_transformers(name: str, conversation: str, tools: list[dict[str, Any]] | None):
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = template_messages(CONVERSATIONS[conversation], TEMPLATES[name])
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (reference,), _ = chat_template_utils.render_jinja_template(
        conversations=[messages], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, **tokens
    )
    assert ChatTemplate(TEMPLATES[name]).render(messages, tools=tools, **tokens) == reference
    if tools:
        assert "get_weather" in reference


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("start", ["The answer is", " ends with a space ", "", "twice twice", "</think> {{ x }}"])
def test_a_continued_message_is_the_prompt_without_its_end(name: str, start: str):
    template = ChatTemplate(TEMPLATES[name])
    messages = [USER, {"role": "assistant", "content": start}]
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": False}
    opened = template.render(messages, continue_final_message=True, **tokens)
    assert opened.endswith(start.lstrip() if name == "llama3.1" else start)
    if start and start == start.strip():
        closed = template.render(messages, **tokens)
        assert closed.startswith(opened)
        assert closed != opened


def test_transformers_cuts_at_the_same_place():
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [USER, {"role": "assistant", "content": "The answer is"}]
    for source in TEMPLATES.values():
        (reference,), _ = chat_template_utils.render_jinja_template(
            conversations=[messages],
            tools=None,
            chat_template=source,
            add_generation_prompt=False,
            continue_final_message=True,
            bos_token="<s>",
            eos_token="</s>",
        )
        options = {"add_generation_prompt": False, "continue_final_message": True}
        assert ChatTemplate(source).render(messages, bos_token="<s>", eos_token="</s>", **options) == reference


@pytest.mark.parametrize(
    ("source", "last"),
    [
        (HERMES, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        (HERMES, {"role": "assistant", "content": None}),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "not shown"}),
        ("{{ messages[-1].content | length }}", {"role": "assistant", "content": "x"}),
    ],
)
def test_what_cannot_be_continued_is_refused(source: str, last: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatTemplate(source).render([USER, last], add_generation_prompt=False, continue_final_message=True)


def test_another_template_than_the_models_own():
    tokenizer = byte_tokenizer()
    assert tokenizer.apply_chat_template([USER], chat_template="<{{ messages[0].content }}>") == "< Weather? >"
    with pytest.raises(InvalidRequest, match="chat_template does not compile"):
        tokenizer.apply_chat_template([USER], chat_template="{% if")
    assert tokenizer.apply_chat_template([USER]).startswith("<|im_start|>user")
