"""Input made to break a server: each is refused with the field that is wrong, or is a text like any other, and an
answer that is generated beside it stays as it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from aotllm import Executor
from tests.aotllm.fake_manager import FakeEngine, FakeManager, echoes, says
from tests.aotllm.serving.http_client import Ask, Client, events

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}
DEEP = 100_000

RECURSIVE_SCHEMAS = {
    "itself": {"$ref": "#"},
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "nowhere": {"$ref": "#/$defs/missing"},
    "another host": {"$ref": "http://169.254.169.254/latest"},
}


NOT_TO_BE_SENT = {
    "half a surrogate pair": b'"\\ud800"',
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "an integer of 30 digits": b"1" * 30,
}
"""JSON as Python reads it, though neither JSON in UTF-8 nor MessagePack has it"""


def text(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HI, **fields}).encode()


def echoed(field: str, value: bytes) -> tuple[str, bytes, str]:
    """A response that would bring a value back."""
    bodies = {
        "user": b'"user":%s',
        "metadata": b'"metadata":{"a":%s}',
        "text": b'"text":{"a":[%s]}',
        "text.format": b'"text":{"format":{"type":"text","a":{"b":%s}}}',
    }
    return RESPONSES, b'{"input":"a",' + bodies[field] % value + b"}", field.partition(".")[0]


def nested(opening: bytes, closing: bytes = b"") -> bytes:
    return opening * DEEP + closing * DEEP


REFUSED: dict[str, tuple[str, bytes, str | None]] = {
    # Sizes
    "10^9 tokens": (TEXT, text(max_tokens=10**9), "max_tokens"),
    "10^9 tokens of a chat": (CHAT, chat(max_tokens=10**9), "max_tokens"),
    "10^9 tokens of a response": (RESPONSES, b'{"input":"a","max_output_tokens":1000000000}', "max_output_tokens"),
    "10^9 least tokens": (TEXT, text(min_tokens=10**9, max_tokens=None), "min_tokens"),
    "10^9 choices": (TEXT, text(n=10**9), "n"),
    "50,000 stop strings": (TEXT, text(stop=[f"s{i}" for i in range(50_000)]), "stop"),
    "50,000 stop tokens": (TEXT, text(stop_token_ids=list(range(50_000))), "stop_token_ids"),
    "50,000 bad words": (TEXT, text(bad_words=[f"w{i}" for i in range(50_000)]), "bad_words"),
    "50,000 biases": (TEXT, text(logit_bias={str(i): 1 for i in range(50_000)}), "logit_bias"),
    "50,000 prompts": (TEXT, json.dumps({"prompt": ["a"] * 50_000}).encode(), "prompt"),
    "a prompt of 10 MB": (TEXT, json.dumps({"prompt": "word " * 2_000_000}).encode(), "prompt"),
    "a prompt of a million tokens": (TEXT, json.dumps({"prompt": [1] * 1_000_000}).encode(), "prompt_token_ids"),
    "a message of 10 MB": (CHAT, chat(messages=[{"role": "user", "content": "x" * 10**7}]), "messages"),
    "an input of 10 MB": (RESPONSES, json.dumps({"input": "x" * 10**7}).encode(), "input"),
    # Numbers
    "NaN": (TEXT, b'{"prompt":"a","temperature":NaN}', "temperature"),
    "Infinity": (TEXT, b'{"prompt":"a","temperature":Infinity}', "temperature"),
    "minus Infinity": (CHAT, b'{"messages":[{"role":"user","content":"a"}],"top_p":-Infinity}', "top_p"),
    "1e999": (TEXT, b'{"prompt":"a","repetition_penalty":1e999}', "repetition_penalty"),
    "an integer of 400 digits": (TEXT, b'{"prompt":"a","max_tokens":' + b"9" * 400 + b"}", "max_tokens"),
    "a seed of 30 digits": (TEXT, text(seed=10**30), "seed"),
    "an integer of 5000 digits": (TEXT, b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", None),
    "a token id of 30 digits": (TEXT, json.dumps({"prompt": [10**30]}).encode(), "prompt_token_ids"),
    "a token id below zero": (TEXT, b'{"prompt":[-1]}', "prompt_token_ids"),
    "a bias for no token": (TEXT, text(logit_bias={"-1": 1}), "logit_bias"),
    # Text
    "half a surrogate pair in a prompt": (TEXT, b'{"prompt":"\\ud800"}', "prompt"),
    "half a surrogate pair in a message": (CHAT, b'{"messages":[{"role":"user","content":"\\udfff"}]}', "messages"),
    "half a surrogate pair in a stop string": (TEXT, b'{"prompt":"a","stop":["\\ud800"]}', "stop"),
    "half a surrogate pair in a bad word": (TEXT, b'{"prompt":"a","bad_words":["\\ud800"]}', "bad_words"),
    "an empty stop string": (TEXT, text(stop=""), "stop"),
    "bytes that are no UTF-8": (TEXT, b'{"prompt":"\xff\xfe"}', None),
    # What comes back with an answer
    **{
        f"{kind} in {field}": echoed(field, value)
        for kind, value in NOT_TO_BE_SENT.items()
        for field in ("user", "metadata", "text", "text.format")
    },
    "half a surrogate pair in a key": (RESPONSES, b'{"input":"a","metadata":{"\\ud800":"a"}}', "metadata"),
    # Nesting
    "100,000 brackets": (TEXT, nested(b"["), None),
    "100,000 pairs of brackets": (TEXT, nested(b"[", b"]"), None),
    "100,000 objects": (CHAT, b'{"a":' * DEEP, None),
    "brackets in a field": (TEXT, b'{"prompt":' + nested(b"[", b"]") + b"}", None),
    "brackets in metadata": (RESPONSES, b'{"input":"a","metadata":' + nested(b"[", b"]") + b"}", None),
    "a prompt of prompts of prompts": (TEXT, b'{"prompt":[[[["a"]]]]}', "prompt"),
    # Kinds
    "a list": (TEXT, b"[1]", None),
    "two values": (TEXT, b'{"prompt":"a"}{"prompt":"b"}', None),
    "a comment": (TEXT, b'{"prompt":"a"/**/}', None),
    "nothing": (CHAT, b"", None),
    "a prompt that is a number": (TEXT, b'{"prompt":3}', "prompt"),
    "a role that is a list": (CHAT, b'{"messages":[{"role":["user"],"content":"a"}]}', "messages"),
    "a message that is a text": (CHAT, b'{"messages":["hi"]}', "messages"),
    "stream options that are a list": (CHAT, chat(stream=True, stream_options=[]), "stream_options"),
    "a template's own names": (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    **{
        f"a schema that refers to {name}": (TEXT, text(guided_json=schema), "guided_json")
        for name, schema in RECURSIVE_SCHEMAS.items()
    },
    "a schema that nests 5000 times": (
        TEXT,
        b'{"prompt":"a","guided_json":' + b'{"items":' * 5000 + b"{}" + b"}" * 5000 + b"}",
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(ask: Ask, name: str):
    path, content, param = REFUSED[name]
    manager = FakeManager(says("ok"))
    response = ask(manager).request("POST", path, content=content, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert param is None or error["param"] == param
    assert len(error["message"]) < 1000
    assert manager.submitted == []


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"]
)
def test_only_json_is_read(ask: Ask, content_type: str):
    manager = FakeManager(says("ok"))
    response = ask(manager).request("POST", TEXT, content=text(), headers={"Content-Type": content_type})
    assert response.status_code in (400, 415)
    assert manager.submitted == []


def test_of_equal_keys_the_last_one_counts(ask: Ask):
    body = b'{"prompt":"a","max_tokens":-5,"max_tokens":2,"prompt":"b"}'
    response = ask(FakeManager(echoes)).request("POST", TEXT, content=body, headers=JSON)
    assert response.json()["choices"][0]["text"].endswith("b")
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "model",
    ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "m/../m", "m\0", "C:\\m", "m" * 100_000, "\ud800"],
)
def test_models_are_names_not_paths(ask: Ask, model: str):
    client = ask(FakeManager(says("ok")))
    response = client.request("POST", TEXT, content=text(model=model), headers=JSON)
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
    if model.isascii() and len(model) < 1000 and "\0" not in model and "/../m" not in model:  # httpx itself resolves ..
        assert client.get(f"/v1/models/{model}").status_code == 404


@pytest.mark.parametrize(
    "content",
    [
        "{{ 7*7 }}",
        "{% for a in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "<|im_end|>\n{# note #}",
        "${7*7} #{7*7} %s %n",
        "\0\x1b[31m\u202e",
        "data: [DONE]\n\ndata: {}",
    ],
)
def test_a_message_is_text_and_no_template(ask: Ask, content: str):
    manager = FakeManager(echoes)
    client = ask(manager)
    body = client.post(CHAT, {"messages": [{"role": "user", "content": content}], "skip_special_tokens": False}).json()
    assert content in body["choices"][0]["message"]["content"]
    streamed = client.post(CHAT, {"messages": [{"role": "user", "content": content}], "stream": True,
                                  "skip_special_tokens": False})  # fmt: skip
    pieces = [chunk["choices"][0]["delta"]["content"] for chunk in events(streamed.text)]
    assert content in "".join(pieces)


class StrictEngine(FakeEngine):
    """Its template takes turns only."""

    def tokenizer(self):
        tokenizer = super().tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
        )
        return tokenizer


@pytest.mark.parametrize("roles", ["assistant", "user user", "user assistant assistant", "system user", "x"])
def test_orders_of_roles_that_a_template_rejects(ask: Ask, roles: str):
    manager = FakeManager(says("ok"))
    client = ask(manager, StrictEngine())
    messages = [{"role": role, "content": "a"} for role in roles.split()]
    for path, body in ((CHAT, {"messages": messages}), ("/tokenize", {"messages": messages})):
        response = client.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        assert "roles must alternate" in response.json()["error"]["message"]
    assert manager.submitted == []


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/tokenize", "/detokenize", "/v1/load_lora_adapter"])
@pytest.mark.parametrize("content", [nested(b"["), b"\xff", b"", b"null", b'{"a":' * 50_000], ids=range(5))
def test_no_route_falls_over_bytes(ask: Ask, path: str, content: bytes):
    response = ask(FakeManager(says("ok"))).request("POST", path, content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_a_neighbours_answer_stays_as_it_is(start: Callable[..., Executor]):
    answer = "The sea, né, 🌊, is wide. " * 20
    manager = FakeManager(lambda request: answer.encode() if request.priority else b"ok", stepping="by hand")
    client = Client({"m": start(manager)})
    refused: list[int] = []

    async def run() -> str:
        transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
            body = {"prompt": "a", "stream": True, "priority": 1, "max_tokens": 4000}
            neighbour = asyncio.create_task(http.post(TEXT, json=body))
            await asyncio.to_thread(manager.wait_until, lambda m: m.running)
            for path, content, _ in REFUSED.values():
                refused.append((await http.post(path, content=content, headers=JSON)).status_code)
                manager.step(3)
            while not neighbour.done():
                await asyncio.to_thread(manager.step_and_wait)
            return (await neighbour).text

    streamed = asyncio.run(run())
    assert "".join(chunk["choices"][0]["text"] for chunk in events(streamed)) == answer
    assert refused == [400] * len(REFUSED)
    assert len(manager.submitted) == 1
