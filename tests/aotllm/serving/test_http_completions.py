"""`/v1/completions` over ASGI."""

from __future__ import annotations

import pytest

from tests.aotllm.byte_tokenizer import BOS, EOS
from tests.aotllm.fake_manager import FakeManager, echoes, says
from tests.aotllm.serving.http_client import Ask, events


def test_an_answer(ask: Ask):
    body = ask(FakeManager(says("sea"))).post("/v1/completions", {"prompt": "a", "model": "m"}).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": "sea", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "total_tokens": 6,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_stream(ask: Ask):
    body = {"prompt": "a", "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    manager = FakeManager(says("sea"), stepping="by hand")
    chunks = events(ask(manager).post_in_steps(manager, "/v1/completions", body).text)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "s", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        [{"index": 0, "text": "e", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        [],
    ]
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        ([97, 98], ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_four_kinds_of_prompt(ask: Ask, prompt: object, texts: list[str], stream: bool):
    response = ask(FakeManager(echoes)).post("/v1/completions", {"prompt": prompt, "stream": stream, "n": 2})
    got = [""] * (2 * len(texts))
    for chunk in events(response.text) if stream else [response.json()]:
        for choice in chunk["choices"]:
            got[choice["index"]] += choice["text"]
    assert got == [text for text in texts for _ in range(2)]  # prompt-major


@pytest.mark.parametrize(("add", "tokens"), [(None, (BOS, 97)), (True, (BOS, 97)), (False, (97,))])
def test_bos_is_added_to_text_unless_told_otherwise(ask: Ask, add: bool | None, tokens: tuple[int, ...]):
    manager = FakeManager(says("ok"))
    ask(manager).post("/v1/completions", {"prompt": "a"} | ({} if add is None else {"add_special_tokens": add}))
    assert manager.submitted[0].prompt_token_ids == tokens


def test_sixteen_tokens_unless_told_otherwise(ask: Ask):
    manager = FakeManager(says("x" * 100))
    body = ask(manager).post("/v1/completions", {"prompt": "a"}).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("x" * 16, "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "text"), [("né", "néok"), (list("né".encode()), "néok")])
def test_echo(ask: Ask, prompt: object, text: str, stream: bool):
    response = ask(FakeManager(says("ok"))).post("/v1/completions", {"prompt": prompt, "echo": True, "stream": stream})
    chunks = events(response.text) if stream else [response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(ask: Ask, stream: bool):
    body = {"prompt": "a", "logprobs": 2, "max_tokens": 2, "stream": stream}
    response = ask(FakeManager(says("xy"))).post("/v1/completions", body)
    merged: dict[str, list[object]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for chunk in events(response.text) if stream else [response.json()]:
        for name, values in chunk["choices"][0]["logprobs"].items():
            merged[name] += values
    assert merged == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["x", "y"],
        "top_logprobs": [{"x": -0.5, "\0": -9999.0}, {"y": -0.5, "\0": -9999.0}],
    }


@pytest.mark.parametrize(
    ("keep", "max_tokens", "tokens"),
    [
        (None, 2, [BOS, *b"abcdef"]),
        (3, 2, list(b"def")),
        (100, 2, [BOS, *b"abcdef"]),
        (-1, 2, [BOS, *b"abcdef"]),
        (-1, 6, list(b"cdef")),  # what leaves room for six of ten
        (-1, 9, list(b"f")),
    ],
)
@pytest.mark.parametrize("prompt", ["abcdef", [BOS, *b"abcdef"]])
def test_the_end_of_a_prompt_is_kept(ask: Ask, prompt: object, keep: int | None, max_tokens: int, tokens: list[int]):
    manager = FakeManager(says("x"), max_seq_len=10)
    body = {"prompt": prompt, "max_tokens": max_tokens, "truncate_prompt_tokens": keep, "echo": True}
    answer = ask(manager).post("/v1/completions", body).json()
    assert list(manager.submitted[0].prompt_token_ids) == tokens
    assert answer["choices"][0]["text"] == bytes(token for token in tokens if token < 256).decode() + "x"
    assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10}, "max_tokens"),
        ({"suffix": "b"}, "suffix"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
def test_what_completions_refuse(ask: Ask, fields: dict[str, object], param: str):
    response = ask(FakeManager(says("x"), max_seq_len=10)).post("/v1/completions", {"prompt": "abc", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_an_empty_suffix_is_none(ask: Ask):
    assert ask(FakeManager(says("x"))).post("/v1/completions", {"prompt": "abc", "suffix": ""}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(ask: Ask, stream: bool):
    body = {"prompt": ["a", "b"], "return_token_ids": True, "stream": stream, "max_tokens": 3}
    response = ask(FakeManager(says("é"))).post("/v1/completions", body)
    for index, prompt in enumerate([[BOS, 97], [BOS, 98]]):
        ids: list[int] = []
        prompts: list[object] = []
        for chunk in events(response.text) if stream else [response.json()]:
            for choice in chunk["choices"]:
                if choice["index"] == index:
                    ids += choice["token_ids"]
                    prompts += [choice["prompt_token_ids"]] if choice["prompt_token_ids"] else []
        assert (ids, prompts) == ([*"é".encode(), EOS], [prompt])


def test_tokens_as_ids_keep_their_places_in_the_text(ask: Ask):
    body = {"prompt": "ab", "logprobs": 1, "max_tokens": 1, "echo": True, "return_tokens_as_token_ids": True}
    logprobs = ask(FakeManager(says("x"))).post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in (BOS, *b"abx")]
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert logprobs["top_logprobs"] == [None, *({f"token_id:{token}": -0.5} for token in b"abx")]


def test_more_prompts_than_the_server_takes(ask: Ask):
    client = ask(FakeManager(says("x")), max_prompts=2)
    assert client.post("/v1/completions", {"prompt": ["a"] * 2}).status_code == 200
    response = client.post("/v1/completions", {"prompt": ["a"] * 3})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
