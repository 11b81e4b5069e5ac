"""Streaming gives the text of the whole, never takes anything back, and costs the same per token."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm.builder.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from aotllm.tokenization import IncrementalDetokenizer, Tokenizer
from aotllm.tokenization.byte_vocabulary import _BYTE_ALPHABET
from tests.tokenizer_models import gguf_metadata, train_sentencepiece
from tests.tokenizer_texts import HARD_TEXTS, plain_text


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "byte-level":
        tokens = [*sorted(_BYTE_ALPHABET), "Ġt", "Ã©", "ðŁĺ", "<|end|>", "<tool>"]
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
            "tokenizer.ggml.merges": ["Ġ t", "Ã ©"],
        }
    else:
        prefix = kind == "sentencepiece"
        metadata = gguf_metadata(train_sentencepiece(user_defined_symbols=["<sep>"], add_dummy_prefix=prefix))
    return Tokenizer(tokenizer_from_gguf(metadata).tokenizer_json)


KINDS = ("byte-level", "sentencepiece", "sentencepiece without prefix")
kinds = st.sampled_from(KINDS)
id_lists = st.lists(st.integers(0, 600), max_size=24)  # some ids have no token


def stream(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: set[int]) -> list[str]:
    """Feed `ids` in runs that end before each of `cuts`."""
    deltas, start = [], 0
    for cut in [*sorted(c for c in cuts if c < len(ids)), len(ids)]:
        deltas.append(detokenizer.append(ids[start:cut]))
        start = cut
    return [*deltas, detokenizer.flush()]


@given(kind=kinds, ids=id_lists, cuts=st.sets(st.integers(0, 24)), skip=st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_split_joins_to_the_whole(kind, ids, cuts, skip):
    whole = tokenizer(kind).decode(ids, skip)
    deltas = stream(IncrementalDetokenizer(tokenizer(kind), skip_special_tokens=skip), ids, cuts)
    assert "".join(deltas) == whole


@given(kind=kinds, prompt=id_lists, ids=id_lists, cuts=st.sets(st.integers(0, 24)), skip=st.booleans())
@settings(max_examples=500, deadline=None)
def test_in_context_it_is_what_the_prompt_text_lacks(kind, prompt, ids, cuts, skip):
    model = tokenizer(kind)
    whole = model.decode(prompt + ids, skip)
    # A prompt that stops inside a character: its text is what is certain, without the replacement character.
    held_back = IncrementalDetokenizer(model, skip_special_tokens=skip).append(prompt)
    deltas = stream(IncrementalDetokenizer(model, prompt, skip), ids, cuts)
    assert held_back + "".join(deltas) == whole


@given(kind=kinds, text=plain_text)
@settings(max_examples=300, deadline=None)
def test_sound_text_never_shows_a_replacement_character(kind, text):
    model = tokenizer(kind)
    detokenizer = IncrementalDetokenizer(model)
    deltas = [detokenizer.append([i]) for i in model.encode(text, add_special_tokens=False)]
    assert not any("\ufffd" in delta for delta in deltas)
    assert detokenizer.flush() == ""
    assert "".join(deltas) == (text if kind == "byte-level" else text.replace("▁", " "))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HARD_TEXTS)
def test_hard_texts_come_back_token_by_token(kind, name):
    model = tokenizer(kind)
    text = HARD_TEXTS[name]
    detokenizer = IncrementalDetokenizer(model)
    ids = model.encode(text, add_special_tokens=False)
    # SentencePiece writes spaces as this character, and reads it back as a space.
    expected = text if kind == "byte-level" else text.replace("▁", " ")
    assert "".join(detokenizer.append([i]) for i in ids) + detokenizer.flush() == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", "the dog"),  # the dummy prefix goes
        ("<s>", "the dog"),  # hidden tokens are no text
        ("<s>the cat", " the dog"),
        ("<s>the cat ", " the dog"),
    ],
)
def test_leading_space_of_sentencepiece(prompt, expected):
    model = tokenizer("sentencepiece")
    detokenizer = IncrementalDetokenizer(model, model.encode(prompt, add_special_tokens=False))
    assert detokenizer.append(model.encode("the dog", add_special_tokens=False)) == expected


def test_shown_special_tokens_are_text():
    model = tokenizer("sentencepiece")
    detokenizer = IncrementalDetokenizer(model, [1], skip_special_tokens=False)
    assert detokenizer.append(model.encode("the dog", add_special_tokens=False)) == " the dog"


def test_a_character_waits_for_its_last_byte():
    model = tokenizer("byte-level")
    detokenizer = IncrementalDetokenizer(model)
    ids = [model.token_to_id(c) for c in "ðŁĺĬ"]  # the four bytes of 😊
    assert [detokenizer.append([i]) for i in ids] == ["", "", "", "😊"]


def test_a_cut_character_is_flushed_as_one_replacement_character():
    model = tokenizer("byte-level")
    detokenizer = IncrementalDetokenizer(model)
    assert detokenizer.append([model.token_to_id("ðŁĺ")]) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_back_stays_small(kind):
    """Bytes that can no longer become a character are given out at once, so that junk does not pile up."""
    model = tokenizer(kind)
    continuation = model.token_to_id("Ģ" if kind == "byte-level" else "<0x80>")
    detokenizer = IncrementalDetokenizer(model)
    assert len(detokenizer.append([continuation] * 10_000)) == 10_000
    assert detokenizer.flush() == ""


def test_the_json_that_is_tested_decodes_in_the_library_alike():
    """Guards the premise of this file: `Tokenizer.decode` is the library's on sound text."""
    raw = json.loads(tokenizer("sentencepiece")._codec.raw.to_str())
    assert [step["type"] for step in raw["decoder"]["decoders"]] == ["Replace", "ByteFallback", "Fuse", "Strip"]
