"""How a chat becomes a prompt: turns left open, echoes, documents, templates of the client's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask, events
from tests.aotllm.tool_templates import TemplateEngine

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
BEGUN = [*HI, {"role": "assistant", "content": "The answer "}]
CONTINUE = {"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}


def prompt(manager: FakeManager) -> str:
    tokenizer = TemplateEngine("").tokenizer()
    return tokenizer.decode(manager.submitted[0].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": HI}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ({"messages": HI, "add_generation_prompt": False}, "<|im_start|>user\nhi<|im_end|>\n"),
        (CONTINUE, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer "),
    ],
)
def test_prompts(ask: Ask, body: dict[str, Any], expected: str):
    manager = FakeManager(says("ok"))
    assert ask(manager).post(CHAT, body).status_code == 200
    assert prompt(manager) == expected


def test_documents_and_variables_reach_the_template(ask: Ask):
    manager = FakeManager(says("ok"))
    engine = TemplateEngine("{{ documents[0].title }}, {{ mood }}: {{ messages[0].content }}")
    body = {"messages": HI, "documents": [{"title": "Doc"}], "chat_template_kwargs": {"mood": "glad"}}
    ask(manager, engine).post(CHAT, body)
    assert prompt(manager) == "Doc, glad: hi"


ECHOES: list[tuple[dict[str, Any], str, str]] = [
    ({**CONTINUE, "echo": True}, "assistant", "The answer is 42"),
    ({**CONTINUE, "echo": False}, "assistant", "is 42"),
    ({"messages": HI, "echo": True}, "assistant", "is 42"),  # of another role
    ({"messages": HI, "echo": True, "add_generation_prompt": False}, "user", "hiis 42"),
    (
        {
            **CONTINUE,
            "echo": True,
            "messages": [*HI, {"role": "assistant", "content": [{"type": "text", "text": "A "}]}],
        },
        "assistant",
        "A is 42",
    ),
]


@pytest.mark.parametrize(("body", "role", "content"), ECHOES)
def test_an_answer_begins_with_the_message_that_it_continues(ask: Ask, body: dict[str, Any], role: str, content: str):
    client = ask(FakeManager(says("is 42")))
    assert client.post(CHAT, body).json()["choices"][0]["message"] == {"role": role, "content": content}
    deltas = [c["choices"][0]["delta"] for c in events(client.post(CHAT, {**body, "stream": True}).text)]
    assert deltas[0] == {"role": role, "content": ""}
    assert "".join(delta["content"] for delta in deltas) == content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
        ({"documents": "x"}, "documents"),
        ({"documents": ["x"]}, "documents"),
        ({"echo": "perhaps"}, "echo"),
    ],
)
def test_refusals(ask: Ask, fields: dict[str, Any], param: str):
    response = ask(FakeManager(says("ok"))).post(CHAT, {"messages": HI, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_server_that_trusts_its_clients_takes_their_templates(ask: Ask):
    manager = FakeManager(says("ok"))
    client = ask(manager, trust_request_chat_template=True)
    assert client.post(CHAT, {"messages": HI, "chat_template": "<{{ messages[0].content }}>"}).status_code == 200
    assert prompt(manager) == "<hi>"
    error = client.post(CHAT, {"messages": HI, "chat_template": "{% if"}).json()["error"]
    assert (error["code"], error["param"]) == (400, "chat_template")
