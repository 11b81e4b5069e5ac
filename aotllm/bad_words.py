"""`bad_words_token_ids`: texts that an answer must not contain, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aotllm.errors import InvalidRequest


class Encoder(Protocol):
    """What is needed of `aotllm.tokenization.Tokenizer`."""

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """Ids of `text`."""


def bad_words_token_ids(tokenizer: Encoder, bad_words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell `bad_words`: each word at the start of a text, and after a space.

    A word that the model spells with other tokens than the tokenizer would is not caught; vLLM and Hugging Face ban by
    tokens, too.

    Raises:
        InvalidRequest: a word is no Unicode text, or has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        bare = word.lstrip(" ")
        for spelling in (bare, " " + bare) if bare else (word,):
            ids = tuple(tokenizer.encode(spelling, add_special_tokens=False, param="bad_words"))
            if not ids:
                raise InvalidRequest(f"bad_words has {word!r:.80}, which has no tokens", "bad_words")
            sequences[ids] = None
    return tuple(sequences)
