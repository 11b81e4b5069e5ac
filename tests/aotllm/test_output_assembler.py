"""Responses to text: pieces of characters, stop strings, end tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotllm import SamplingParams
from aotllm.output_assembler import OutputAssembler
from aotllm.tokenization import IncrementalDetokenizer
from tests.aotllm.byte_tokenizer import EOS, byte_tokenizer
from tests.aotllm.fake_manager import FakeResponse
from tests.aotllm.test_stop_strings import expected

TOKENIZER = byte_tokenizer()


def assembler(**sampling: object) -> OutputAssembler:
    params = SamplingParams(**sampling)
    return OutputAssembler(IncrementalDetokenizer(TOKENIZER, (), params.skip_special_tokens), params)


@given(st.text(max_size=12), st.integers(1, 5), st.sampled_from([(), ("a",), ("é🌊", "0")]))
def test_text_does_not_depend_on_the_number_of_tokens_per_step(text: str, size: int, stop: tuple[str, ...]):
    tokens = [*text.encode(), EOS]
    whole, stepped = assembler(stop=stop), assembler(stop=stop)
    whole.add(FakeResponse(1, tokens, finish_reason="stop", stop_token_id=EOS))
    shown = ""
    for at in range(0, len(tokens), size):
        step = tokens[at : at + size]
        ended = EOS in step
        response = FakeResponse(1, step, finish_reason="stop" if ended else None, stop_token_id=EOS if ended else None)
        shown += stepped.add(response).text
        if stepped.finish_reason is not None:
            break
    assert (shown, stepped.text, stepped.token_ids, stepped.stop_reason) == (
        whole.text,
        whole.text,
        whole.token_ids,
        whole.stop_reason,
    )


class PieceVocabulary:
    """Tokens that stand for any bytes at all; the id is the index."""

    errors = "replace"
    strips_leading_space = False

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text, and its bytes cut into tokens anywhere: inside of characters, too."""
    text = draw(st.text("ab é€🌊", min_size=1, max_size=16))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, len(data) - 1)))) if len(data) > 1 else []
    return text, [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(
    answers(),
    st.lists(st.text("ab é€🌊", min_size=1, max_size=4), max_size=3),
    st.integers(0, 6),
    st.booleans(),
    st.data(),
)
def test_stop_strings_are_found_however_tokens_cut_the_text(
    answer: tuple[str, list[bytes]], stops: list[str], min_tokens: int, include: bool, data: st.DataObject
):
    text, pieces = answer
    params = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    tokenizer: Any = SimpleNamespace(byte_vocabulary=PieceVocabulary(pieces))
    out = OutputAssembler(IncrementalDetokenizer(tokenizer), params)
    shown, at = "", 0
    while at < len(pieces) and out.finish_reason is None:
        size = data.draw(st.integers(1, len(pieces) - at))
        reason = "length" if at + size == len(pieces) else None
        shown += out.add(FakeResponse(1, list(range(at, at + size)), finish_reason=reason)).text
        at += size
    # Characters that are complete within the first min_tokens tokens cannot be the last of a stop string that counts.
    safe = len(b"".join(pieces[:min_tokens]).decode(errors="ignore"))
    assert (shown, out.stop_reason) == expected(text, stops, include, safe)
    assert out.text == shown
    if out.stop_reason is not None:  # the tokens end with the one that completed it
        end = len(shown) if include else len(shown) + len(str(out.stop_reason))
        assert len(b"".join(pieces[: len(out.token_ids) - 1])) < len(text[:end].encode())
        assert len(out.token_ids) > min_tokens


def test_stop_strings_wait_for_min_tokens():
    out = assembler(stop="a", min_tokens=2)
    assert out.add(FakeResponse(1, list(b"aab"))).text == "aab"
    assert (out.add(FakeResponse(1, list(b"ca"))).text, out.stop_reason) == ("c", "a")


def test_an_incomplete_character_waits():
    out = assembler()
    assert [out.add(FakeResponse(1, [byte])).text for byte in "é€".encode()] == ["", "é", "", "", "€"]


def test_an_incomplete_character_at_the_end_is_replaced():
    out = assembler()
    out.add(FakeResponse(1, list("né".encode()[:2])))
    assert out.add(FakeResponse(1, [ord("!")], finish_reason="length")).text == "\ufffd!"


def test_tokens_after_the_stop_string_are_dropped():
    out = assembler(stop="b", logprobs=None)
    output = out.add(FakeResponse(1, list(b"abc")))
    assert (output.text, output.token_ids) == ("a", tuple(b"ab"))
    assert (output.finish_reason, output.stop_reason) == ("stop", "b")


def test_a_held_back_text_comes_with_the_end():
    out = assembler(stop="stop")
    assert out.add(FakeResponse(1, list(b"st"))).text == ""
    output = out.add(FakeResponse(1, [EOS], finish_reason="stop", stop_token_id=EOS))
    assert (output.text, output.stop_reason) == ("st", None)


def test_a_stop_string_that_the_last_flush_completes_counts():
    out = assembler(stop="\ufffd")
    output = out.add(FakeResponse(1, ["é".encode()[0], EOS], finish_reason="stop", stop_token_id=EOS))
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "\ufffd")


@pytest.mark.parametrize(
    ("sampling", "text", "stop_reason"),
    [
        ({}, "a", None),
        ({"stop_token_ids": [ord("b")]}, "a", ord("b")),
        ({"stop_token_ids": [ord("b")], "include_stop_str_in_output": True}, "ab", ord("b")),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a</s>", None),
    ],
)
def test_the_end_token_counts_but_its_text_is_hidden(sampling: dict[str, object], text: str, stop_reason: int | None):
    end = ord("b") if "stop_token_ids" in sampling else EOS
    out = assembler(**sampling)
    out.add(FakeResponse(1, [ord("a"), end], finish_reason="stop", stop_token_id=end))
    assert (out.text, out.token_ids, out.stop_reason) == (text, [ord("a"), end], stop_reason)
