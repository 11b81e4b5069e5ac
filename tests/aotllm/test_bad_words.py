"""Banned texts in tokens: at the start of a text and after a space."""

from __future__ import annotations

import pytest

from aotllm.bad_words import bad_words_token_ids
from aotllm.errors import InvalidRequest
from tests.aotllm.byte_tokenizer import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.mark.parametrize(
    ("words", "sequences"),
    [
        ([], []),
        (["no"], [b"no", b" no"]),
        (["  no"], [b"no", b" no"]),
        (["no", " no"], [b"no", b" no"]),
        (["é"], ["é".encode(), " é".encode()]),
        ([" "], [b" "]),
        (["\n"], [b"\n", b" \n"]),
        (["a b"], [b"a b", b" a b"]),
    ],
)
def test_sequences(words: list[str], sequences: list[bytes]):
    assert [bytes(ids) for ids in bad_words_token_ids(TOKENIZER, words)] == sequences


def test_special_tokens_can_be_banned():
    assert bad_words_token_ids(TOKENIZER, ["</s>"]) == ((EOS,), (ord(" "), EOS))


def test_half_a_character_is_refused():
    with pytest.raises(InvalidRequest) as caught:
        bad_words_token_ids(TOKENIZER, ["a", "\ud800"])
    assert caught.value.param == "bad_words"


def test_a_word_without_tokens_is_refused():
    class Mute:
        def encode(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
            return []

    with pytest.raises(InvalidRequest, match="'no', which has no tokens"):
        bad_words_token_ids(Mute(), ["no"])
