"""Responses to text: pieces of characters, stop strings, end tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotllm import SamplingParams
from aotllm.output_assembler import OutputAssembler
from aotllm.tokenization import IncrementalDetokenizer
from tests.aotllm.byte_tokenizer import EOS, byte_tokenizer
from tests.aotllm.fake_manager import FakeResponse

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
