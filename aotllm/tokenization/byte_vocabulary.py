"""`ByteVocabulary`: the bytes behind each token, which is what decoding, streaming and logprobs need.

A sequence of tokens decodes to the concatenation of their bytes, read as UTF-8. That holds for byte-level BPE and for
SentencePiece, the two families of current models, and makes decoding stable: a token only ever appends bytes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from aotllm.errors import EngineError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_UNUSED_TOKEN = re.compile(r"<unused_?\d+>|\[unused_?\d+\]|<\|?reserved\w*\|?>")

_SPACES = " \t\r\n\u2581"
"""White space, as vocabularies spell it"""

_EACH_BYTE = "aotllm.each_byte"
"""Codec error handler: one U+FFFD for each invalid byte, as SentencePiece decodes"""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other 68 for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return alphabet


_BYTE_ALPHABET = _byte_alphabet()


class ByteVocabulary:
    """Bytes of every token of a vocabulary, computed once per token.

    Args:
        spelling: the token of an id as the vocabulary spells it; None for ids without one.
        special: ids that `skip_special_tokens` hides.
        markup: those and the other added tokens but for white space.
        decoder: state of the decoder of `tokenizers`, as JSON; None = there is none.

    Attributes:
        errors: codec error handler under which the bytes are read as UTF-8.
        strips_leading_space: a text loses one leading space (the one that SentencePiece put there).

    Raises:
        EngineError: the decoder does something else than concatenate bytes.
    """

    def __init__(
        self,
        spelling: Callable[[int], str | None],
        special: Collection[int],
        markup: Collection[int],
        decoder: str | bytes | None,
    ) -> None:
        self._spelling = spelling
        self._bytes: dict[int, bytes] = {}
        self._special = frozenset(special)
        self._markup = frozenset(markup)
        self._byte_level = False
        self._byte_fallback = False
        self._space: str | None = None
        self.strips_leading_space = False
        for step in _decoder_steps(decoder):
            self._configure(step)
        self.errors = "replace" if self._byte_level else _EACH_BYTE

    def _configure(self, step: dict[str, Any]) -> None:
        kind = step.get("type")
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Fuse":
            pass
        elif kind == "Replace" and step.get("content") == " " and "String" in step.get("pattern", {}):
            self._space = step["pattern"]["String"]
        elif kind == "Strip" and (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0):
            self.strips_leading_space = True
        elif kind == "Metaspace":
            self._space = step.get("replacement", "\u2581")
            self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
        else:
            raise EngineError(
                f"tokenizer.json: decoder {json.dumps(step)} is not supported; supported are ByteLevel, Metaspace, "
                "ByteFallback, Fuse, Replace of a character by a space, and Strip of one leading space"
            )

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` hides the token."""
        return token_id in self._special

    def is_text(self, token_id: int) -> bool:
        """Whether text is made of the token.

        It is not of markup: control tokens, placeholders without a use, and tokens added to the vocabulary (but for
        white space), which stand for something in chats (`<tool_call>`). Other tokens can spell what they look like.
        """
        if token_id in self._markup:
            return False
        token = self._spelling(token_id) if 0 <= token_id < 1 << 32 else None
        return token is not None and not _UNUSED_TOKEN.fullmatch(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token adds to a text; empty for ids without a token (padded vocabularies have some)."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._compute(token_id)
        return cached

    def join(self, ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """Bytes of a sequence of tokens."""
        hidden = self._special if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden)

    def _compute(self, token_id: int) -> bytes:
        token = self._spelling(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_ALPHABET[char] for char in token)
            except KeyError:  # an added token, which is spelled as it appears in text
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self._space is not None:
            token = token.replace(self._space, " ")
        return token.encode()


def is_markup(content: str, special: bool) -> bool:
    """Whether an added token stands for something in chats, rather than for its characters."""
    return special or bool(content.strip(_SPACES))


def _decoder_steps(decoder: str | bytes | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise EngineError("tokenizer.json: there is no decoder; ids could not be turned back into text")
    state: dict[str, Any] = json.loads(decoder)
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    return list(steps)
