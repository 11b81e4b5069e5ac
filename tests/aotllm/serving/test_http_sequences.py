"""Several answers to one prompt, scored prompts, beam search, adapters, time limits: over ASGI."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aotllm import Executor
from aotllm.manager import ManagerRequest
from tests.aotllm.byte_tokenizer import BOS, EOS
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask, Client, events

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def bodies(path: str) -> dict[str, Any]:
    return {"messages": HI} if path == CHAT else {"prompt": "a"}


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def numbered(request: ManagerRequest, index: int) -> bytes:
    return b"%d" % index * (index + 1)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_n_answers_come_from_one_request(ask: Ask, path: str):
    manager = FakeManager(nth_answer=numbered, num_cached_tokens=1)
    body = ask(manager).post(path, {**bodies(path), "n": 3}).json()
    assert [(c["index"], text_of(c), c["finish_reason"]) for c in body["choices"]] == [
        (0, "0", "stop"),
        (1, "11", "stop"),
        (2, "222", "stop"),
    ]
    assert [request.n for request in manager.submitted] == [3]
    assert body["usage"]["completion_tokens"] == 2 + 3 + 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_streamed_choices_are_interleaved_by_index_and_prompt_major(ask: Ask):
    def answer(request: ManagerRequest, index: int) -> list[int]:
        return [request.prompt_token_ids[-1], ord("0") + index]

    manager = FakeManager(nth_answer=answer, stepping="by hand")
    body = {"prompt": ["a", "b"], "n": 2, "stream": True}
    chunks = events(ask(manager).post_in_steps(manager, TEXT, body, requests=2).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in range(4)]
    assert texts == ["a0", "a1", "b0", "b1"]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2, 3]
    first_end = next(i for i, c in enumerate(choices) if c["finish_reason"])
    assert {0, 1} <= {c["index"] for c in choices[:first_end]}


@pytest.mark.parametrize("stream", [False, True])
def test_best_of_keeps_the_likeliest_and_counts_all(ask: Ask, stream: bool):
    def top(text: Sequence[int]) -> list[tuple[int, float]]:
        return [(ord("2"), -0.1), (ord("1"), -0.2), (ord("0"), -0.3), (EOS, -0.4)]

    manager = FakeManager(nth_answer=lambda request, index: b"%d" % index, top=top)
    body = {"prompt": "a", "n": 2, "best_of": 3, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = ask(manager).post(TEXT, body)
    chunks = events(response.text) if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(c["index"], c["text"], c["logprobs"]) for c in choices] == [(0, "2", None), (1, "1", None)]
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert manager.submitted[0].n == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_own_choice_only(ask: Ask, stream: bool):
    manager = FakeManager(nth_answer=lambda request, index: b"one. two." if index else b"none", stepping="free")
    response = ask(manager).post(TEXT, {"prompt": "a", "n": 2, "stop": ".", "stream": stream})
    chunks = events(response.text) if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in range(2)]
    reasons = {c["index"]: c["stop_reason"] for c in choices if c["finish_reason"]}
    assert (texts, reasons) == (["none", "one"], {0: None, 1: "."})
    assert manager.cancelled_sequences == [(1, 1)]


# Prompts with log-probabilities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_scores_the_prompt(ask: Ask, stream: bool, n: int):
    body = {"prompt": "né", "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream, "n": n}
    response = ask(FakeManager(says("xy"))).post(TEXT, body)
    chunks = events(response.text) if stream else [response.json()]
    for index in range(n):
        merged: dict[str, list[object]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        text = ""
        for choice in [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]:
            text += choice["text"]
            for name, values in choice["logprobs"].items():
                merged[name] += values
        assert text == "néx"
        # Two tokens are halves of one character here, and the text of each is a replacement character.
        assert merged["tokens"] == ["<s>", "n", "\ufffd", "\ufffd", "x"]
        assert merged["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
        assert merged["top_logprobs"][:2] == [None, {"n": -0.5}]
        assert merged["text_offset"][-1] == 2


def test_text_offsets_skip_tokens_that_are_not_in_the_text(ask: Ask):
    body = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 1}
    logprobs = ask(FakeManager(says("x"))).post(TEXT, body).json()["choices"][0]["logprobs"]
    assert list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True)) == [
        ("<s>", 0),
        ("a", 0),
        ("b", 1),
        ("c", 2),
        ("x", 3),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_with_echo_only_scores(ask: Ask, stream: bool):
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = ask(FakeManager(says("xy"))).post(TEXT, body)
    chunks = events(response.text) if stream else [response.json()]
    (choice,) = [c for chunk in chunks for c in chunk["choices"]]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == (
        "ab",
        "length",
        ["<s>", "a", "b"],
    )
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_prompt_logprobs(ask: Ask):
    entry = {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
    nothing = {"0": {"logprob": -9999.0, "rank": 2, "decoded_token": "\0"}}
    client = ask(FakeManager(says("x")))
    choices = client.post(TEXT, {"prompt": "a", "prompt_logprobs": 2, "n": 2}).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [[None, entry | nothing]] * 2
    # The echoed prompt may show more than what is asked for beside it.
    body = {"prompt": "a", "prompt_logprobs": 0, "echo": True, "logprobs": 2}
    choice = client.post(TEXT, body).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"97": {"logprob": -0.5, "rank": None, "decoded_token": "a"}}]
    assert choice["logprobs"]["top_logprobs"][1] == {"a": -0.5, "\0": -9999.0}
    chat = client.post(CHAT, {"messages": HI, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


# Beam search ----------------------------------------------------------------------------------------------------------


def pairs(text: Sequence[int]) -> list[tuple[int, float]]:
    """The greedy answer begins with b; the most likely one is ac."""
    after = {ord("a"): [("c", 0.9), ("d", 0.1)], ord("b"): [("c", 0.5), ("d", 0.5)]}
    likely = after.get(text[-1], [("b", 0.6), ("a", 0.4)])
    return [(ord(char), math.log(p)) for char, p in likely]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_beam_search(ask: Ask, path: str):
    manager = FakeManager(top=pairs)
    client = ask(manager)
    body = {**bodies(path), "use_beam_search": True, "beam_width": 3, "n": 2, "max_tokens": 2}
    if path == TEXT:
        body["prompt"] = "?"
    answer = client.post(path, body).json()
    assert [(c["index"], text_of(c), c["finish_reason"]) for c in answer["choices"]] == [
        (0, "ac", "length"),
        (1, "bc", "length"),
    ]
    assert answer["usage"]["completion_tokens"] == 1 + 2  # one beam, then two
    assert {request.sampling.max_tokens for request in manager.submitted} == {1}


def test_there_are_n_beams_unless_told_otherwise(ask: Ask):
    choices = ask(FakeManager(top=pairs)).post(
        TEXT, {"prompt": "?", "use_beam_search": True, "n": 1, "max_tokens": 2, "early_stopping": True}
    )
    assert [c["text"] for c in choices.json()["choices"]] == ["bc"]


# Adapters, time limits, salts -----------------------------------------------------------------------------------------


@pytest.fixture
def adapted(start: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch) -> tuple[Client, FakeManager]:
    monkeypatch.setattr("aotllm.adapters.read_adapter", lambda folder: f"weights of {folder}")
    manager = FakeManager(says("ok"))
    executor = start(manager)
    executor.load_lora("poet", "folder/poet")
    return Client({"m": executor}), manager


def test_an_adapter_is_a_model_of_its_own(adapted: tuple[Client, FakeManager]):
    client, manager = adapted
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("m", None), ("poet", "m")]
    assert client.get("/v1/models/poet").json()["parent"] == "m"
    for path in (CHAT, TEXT):
        answer = client.post(path, {**bodies(path), "model": "poet"}).json()
        assert answer["model"] == "poet"
        client.post(path, {**bodies(path), "model": "m"})
    assert [request.adapter for request in manager.submitted] == [1, 0, 1, 0]
    assert client.post(TEXT, {"prompt": "a", "model": "painter"}).status_code == 404


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_request_options_reach_the_request(ask: Ask, path: str):
    manager = FakeManager(says("ok"))
    options = {"priority": 3, "timeout": 2.5, "cache_salt": "mine", "retention_priority": 80}
    client = ask(manager)
    client.post(path, {**bodies(path), **options})
    client.post(path, {**bodies(path), **dict.fromkeys(options)})
    given, default = manager.submitted
    assert {name: getattr(given, name) for name in options} == options
    assert (default.priority, default.timeout, default.cache_salt, default.retention_priority) == (0, 0, "", 35)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_time_is_over_is_one_that_was_cut(ask: Ask, stream: bool):
    def answer(_: object) -> itertools.chain[int]:
        def late() -> Any:
            yield ord("a")
            manager.time_out(1)
            yield ord("b")

        return itertools.chain(late())

    manager = FakeManager(answer)
    response = ask(manager).post(CHAT, {"messages": HI, "stream": stream, "timeout": 1})
    assert response.status_code == 200
    end = (events(response.text)[-1] if stream else response.json())["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == ("length", "timeout")


def test_scoring_needs_bos_only_where_the_tokenizer_has_it(ask: Ask):
    manager = FakeManager(says("x"))
    ask(manager).post(TEXT, {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0})
    assert manager.submitted[0].prompt_token_ids[0] == BOS
    assert (manager.submitted[0].prompt_logprobs, manager.submitted[0].sampling.max_tokens) == (1, 1)
