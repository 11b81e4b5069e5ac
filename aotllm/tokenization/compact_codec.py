"""`CompactCodec`: ids of texts from a `tokenizer.tokens`, which is mapped and not read.

`tokenizers` still finds added tokens and splits text into words, by a splitter that has no vocabulary and loads in
milliseconds; the runtime merges the words' symbols. What comes out is what `tokenizer.json` gives, which the build has
checked (`aotllm.builder.compact_tokens`).
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer

from aotllm import _runtime
from aotllm.errors import EngineError
from aotllm.tokenization.byte_vocabulary import ByteVocabulary
from aotllm.tokenization.library_errors import library_errors


class CompactCodec:
    """See `Codec`. Raises EngineError where the file is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokens = _runtime.CompactTokens(str(path))
        with library_errors(lambda why: EngineError(f"{path}: cannot be read: {why}; build the engine again")):
            facts = json.loads(self._tokens.text("facts"))
            self._splitter = RawTokenizer.from_str(self._tokens.text("splitter"))
            self._added: list[int] = facts["added"]
            self._before: list[int] = facts["before"]
            self._after: list[int] = facts["after"]
            self._vocab_size: int = facts["vocab_size"]
            decoder: str = facts["decoder"]
        # The splitter numbers its added tokens in their order, from 1; 0 is a word.
        if self._splitter.get_vocab_size(with_added_tokens=True) != len(self._added):
            raise EngineError(f"{path}: the splitter and its added tokens do not fit; build the engine again")
        self.byte_vocabulary = ByteVocabulary(
            self._tokens.id_to_token, self._tokens.special_ids(), self._tokens.markup_ids(), decoder
        )

    @property
    def vocab_size(self) -> int:
        """See `Codec`."""
        return self._vocab_size

    def token_to_id(self, token: str) -> int | None:
        """See `Codec`."""
        return self._tokens.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See `Codec`."""
        with library_errors(lambda why: EngineError(f"{self._path} is damaged: {why}; build the engine again")):
            words = self._splitter.encode(text, add_special_tokens=False)
            ids = self._tokens.encode(text, words.ids, words.offsets, self._added)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids
