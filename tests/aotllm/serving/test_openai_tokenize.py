"""`/tokenize` and `/detokenize`: both forms, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aotllm.byte_tokenizer import BOS, END, EOS, START
from tests.aotllm.fake_manager import FakeManager
from tests.aotllm.serving.http_client import Ask

HI = [{"role": "user", "content": "hi"}]
HI_TOKENS = [START, *b"user\nhi", END, *b"\n"]
OPENING = [START, *b"assistant\n"]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "né"}, [BOS, *"né".encode()]),
        ({"prompt": "a", "add_special_tokens": False}, [97]),
        ({"prompt": "a</s>", "model": "m"}, [BOS, 97, EOS]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"messages": HI}, [*HI_TOKENS, *OPENING]),
        ({"messages": HI, "add_generation_prompt": False}, HI_TOKENS),
        ({"messages": HI, "add_generation_prompt": False, "add_special_tokens": True}, [BOS, *HI_TOKENS]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, [*HI_TOKENS, *OPENING]),
    ],
)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_vllms_form(ask: Ask, path: str, body: dict[str, Any], tokens: list[int]):
    answer = ask(FakeManager(max_seq_len=50)).post(path, body).json()
    assert answer == {"count": len(tokens), "max_model_len": 50, "tokens": tokens, "token_strs": None}


def test_texts_of_tokens(ask: Ask):
    client = ask(FakeManager())
    assert client.post("/tokenize", {"prompt": "né", "return_token_strs": True}).json()["token_strs"] == [
        "<s>",
        "n",
        "\ufffd",
        "\ufffd",
    ]
    pieces = client.post("/tokenize", {"content": "né", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 110, "piece": "n"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]


@pytest.mark.parametrize(
    ("body", "tokens"), [({"content": "ab"}, [97, 98]), ({"content": "a", "add_special": True}, [BOS, 97])]
)
def test_llama_servers_form(ask: Ask, body: dict[str, Any], tokens: list[int]):
    assert ask(FakeManager()).post("/tokenize", body).json() == {"tokens": tokens}


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_detokenize_has_both_names(ask: Ask, path: str):
    answer = ask(FakeManager()).post(path, {"tokens": [BOS, *"né".encode()]}).json()
    assert answer == {"prompt": "<s>né", "content": "<s>né"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": 3}]}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ("/tokenize", {"messages": HI, "chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs"),
        ("/tokenize", {"content": "a", "parse_special": False}, 400, "parse_special"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [260]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
    ],
)
def test_what_is_refused(ask: Ask, path: str, body: dict[str, Any], status: int, param: str):
    response = ask(FakeManager()).post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
