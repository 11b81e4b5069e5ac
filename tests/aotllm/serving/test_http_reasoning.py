"""Reasoning comes apart from the content: whole and in streams, with tools, forms and usage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm.serving.openai.pieces import Content, Piece, Reasoning
from aotllm.serving.openai.reasoning import (
    MARKERS,
    ReasoningMarkers,
    ReasoningParser,
    count_reasoning_tokens,
    reasoning_markers,
)
from tests.aotllm.byte_tokenizer import END, START, byte_tokenizer
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask, Client, events
from tests.aotllm.tool_templates import HERMES, THINKING, TemplateEngine

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
THINK = MARKERS["qwen3"]
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def read(texts: Iterable[str], opened: bool) -> tuple[str, str]:
    """Reasoning and content."""
    parser = ReasoningParser(THINK, opened)
    pieces: list[Piece] = [piece for text in texts for piece in parser.push(text)] + parser.flush()
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return reasoning, "".join(piece.text for piece in pieces if isinstance(piece, Content))


CASES = [
    ("<think>why</think>so", False, "why", "so"),
    ("<think>\nwhy\n\nnot \n</think>\n\nso\n", False, "why\n\nnot", "so\n"),
    ("\n<think>why</think>so", False, "why", "so"),
    ("<think>\n\n</think>\n\nso", False, "", "so"),
    ("why</think>so", True, "why", "so"),
    ("<think>why</think>so", True, "why", "so"),  # opened twice
    ("\n\nwhy\n</think>", True, "why", ""),
    ("so it is", False, "", "so it is"),
    (" so <think>why</think>", False, "", " so <think>why</think>"),  # not at the beginning
    ("<think>why", False, "why", ""),  # cut
    ("why </thi", True, "why </thi", ""),
    ("<thi", False, "", "<thi"),
    ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ("", False, "", ""),
    ("", True, "", ""),
    (" ", False, "", " "),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), CASES)
def test_reasoning(text: str, opened: bool, reasoning: str, content: str):
    assert read([text], opened) == (reasoning, content)


SCRAPS = st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", ">", "\n", " ", "a", "é", "<"]), max_size=10)


@settings(deadline=None, max_examples=600)
@given(text=SCRAPS.map("".join), opened=st.booleans(), cuts=st.lists(st.integers(0), max_size=8))
def test_cuts_do_not_matter(text: str, opened: bool, cuts: list[int]):
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    expected = read([text], opened)
    assert read([text[a:b] for a, b in itertools.pairwise(bounds)], opened) == expected
    assert read(text, opened) == expected
    letters = text.translate({ord(c): None for c in " \n"})
    shown = "".join(expected).translate({ord(c): None for c in " \n"})
    assert len(shown) >= len(letters) - len("<think></think>")  # the markers at most are gone


@pytest.mark.parametrize(
    ("text", "opened", "count"),
    [
        ("<think>why</think>so", False, len("<think>why</think>")),
        ("why</think>so", True, len("why</think>")),
        ("why", True, 3),
        ("<think>why", False, len("<think>why")),
        ("so it is", False, 0),
        ("", True, 0),
        ("so</think>", False, 0),
    ],
)
def test_reasoning_tokens(text: str, opened: bool, count: int):
    assert count_reasoning_tokens(THINK, byte_tokenizer(), list(text.encode()), opened) == count


def test_reasoning_tokens_where_markers_are_tokens():
    markers = ReasoningMarkers("<|im_start|>", "<|im_end|>")
    tokens = [START, *b"why", END, *b"so"]
    assert count_reasoning_tokens(markers, byte_tokenizer(), tokens, False) == 5
    assert count_reasoning_tokens(markers, byte_tokenizer(), tokens[1:], True) == 4
    assert count_reasoning_tokens(markers, byte_tokenizer(), tokens[1:], False) == 0


@pytest.mark.parametrize(
    ("option", "template", "markers"),
    [
        ("auto", THINKING, THINK),
        ("auto", HERMES, None),
        ("auto", None, None),
        ("auto", "[THINK][/THINK]", MARKERS["mistral"]),
        ("none", THINKING, None),
        ("deepseek_r1", None, THINK),
    ],
)
def test_the_option(option: str, template: str | None, markers: object):
    assert reasoning_markers(option, template) == markers


# Over HTTP -----------------------------------------------------------------------------------------------------------


def thinker(ask: Ask, text: str, **options: Any) -> Client:
    return ask(FakeManager(says(text)), TemplateEngine(THINKING), **options)


def answers(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """The message as a whole, and put together from a stream."""
    body = {"messages": HI, **fields}
    whole = client.post(CHAT, body).json()["choices"][0]
    message = {**whole["message"], "finish_reason": whole["finish_reason"]}
    streamed: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in events(client.post(CHAT, {**body, "stream": True}).text):
        (choice,) = chunk["choices"]
        for name in ("content", "reasoning", "reasoning_content"):
            if name in choice["delta"]:
                streamed[name] = streamed.get(name, "") + choice["delta"][name]
        if "tool_calls" in choice["delta"]:
            streamed.setdefault("tool_calls", []).append(choice["delta"]["tool_calls"])
        streamed["finish_reason"] = choice["finish_reason"]
    return [message, streamed]


def test_it_comes_under_both_names(ask: Ask):
    expected = {
        "role": "assistant",
        "content": "so",
        "reasoning": "why",
        "reasoning_content": "why",
        "finish_reason": "stop",
    }
    assert answers(thinker(ask, "<think>\nwhy\n</think>\n\nso")) == [expected] * 2


def test_a_prompt_that_begins_it(ask: Ask):
    for message in answers(thinker(ask, "why\n</think>\n\nso"), chat_template_kwargs={"force_thinking": True}):
        assert (message["reasoning"], message["content"]) == ("why", "so")
    for message in answers(thinker(ask, "why\n</think>\n\nso")):
        assert message["content"] == "why\n</think>\n\nso"


def test_it_can_be_left_out(ask: Ask):
    for message in answers(thinker(ask, "<think>why</think>so"), include_reasoning=False):
        assert message == {"role": "assistant", "content": "so", "finish_reason": "stop"}


def test_an_answer_without_it_looks_as_ever(ask: Ask):
    for message in answers(thinker(ask, "so")):
        assert message == {"role": "assistant", "content": "so", "finish_reason": "stop"}


def test_it_can_be_turned_off(ask: Ask):
    for message in answers(thinker(ask, "<think>why</think>so", reasoning_parser="none")):
        assert message["content"] == "<think>why</think>so"


def test_a_cut_answer_is_all_reasoning(ask: Ask):
    for message in answers(thinker(ask, "<think>why</think>so"), max_tokens=9):
        assert (message["reasoning"], message["content"], message["finish_reason"]) == ("wh", "", "length")


def test_calls_are_looked_for_after_it_only(ask: Ask):
    for message in answers(thinker(ask, f"<think>{CALL}?</think>\n{CALL}"), tools=TOOLS):
        assert message["reasoning"] == f"{CALL}?"
        assert not message["content"]
        assert message["finish_reason"] == "tool_calls"
        assert message["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_its_tokens(ask: Ask, stream: bool):
    text = "<think>why</think>so"
    body: dict[str, Any] = {"messages": HI, "n": 2, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = thinker(ask, text).post(CHAT, body)
    usage = events(response.text)[-1]["usage"] if stream else response.json()["usage"]
    assert usage["completion_tokens"] == 2 * (len(text) + 1)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len("<think>why</think>")}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
    ],
)
def test_a_form_leaves_no_room_for_it_and_the_template_is_told(ask: Ask, fields: dict[str, Any]):
    manager = FakeManager(says("{}"))
    client = ask(manager, TemplateEngine(THINKING))
    client.post(CHAT, {"messages": HI, **fields})
    client.post(CHAT, {"messages": HI, **fields, "chat_template_kwargs": {"enable_thinking": True}})
    ends = [bytes(t for t in request.prompt_token_ids if t < 256)[-25:] for request in manager.submitted]
    assert ends[0].endswith(b"<think>\n\n</think>\n\n")
    assert not ends[1].endswith(b"</think>\n\n")  # the client's own word counts
