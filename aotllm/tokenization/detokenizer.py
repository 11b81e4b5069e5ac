"""`IncrementalDetokenizer`: generated tokens to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aotllm.tokenization.tokenizer import Tokenizer

_MAX_UTF8_BYTES = 4


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text without ever taking back what it gave out.

    The pieces that `append` returns, joined, plus `flush()`, are the text that the generated tokens add to the
    prompt's: `decode(prompt + generated)` without its first `len(decode(prompt))` characters. (Where the prompt ends
    inside a character, that character belongs to the generated text.) Bytes that may yet become a character are held
    back, three at most. Work is constant per token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
    ) -> None:
        """`prompt_ids` decide on a leading space and on a character that the prompt begins. `shown` are special tokens
        that are not skipped."""
        self._vocabulary = tokenizer.byte_vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=self._vocabulary.errors)
        self._at_start = self._vocabulary.strips_leading_space and not any(map(self._bytes, prompt_ids))
        self._decoder.decode(self._tail(prompt_ids))

    def append(self, ids: Iterable[int]) -> str:
        """The text that became final with `ids`; empty where a character is still incomplete."""
        data = b"".join(map(self._bytes, ids))
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End the sequence: what was held back, as replacement characters."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._vocabulary.is_special(token_id) and token_id not in self._shown:
            return b""
        return self._vocabulary.token_bytes(token_id)

    def _tail(self, ids: Sequence[int]) -> bytes:
        """Enough bytes of the end of the prompt to know whether it stops inside a character."""
        tail = b""
        for token_id in reversed(ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _MAX_UTF8_BYTES:
                break
        return tail
