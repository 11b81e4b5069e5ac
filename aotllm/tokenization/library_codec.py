"""`LibraryCodec`: ids of texts by Hugging Face's `tokenizers`, from a `tokenizer.json`."""

from __future__ import annotations

from tokenizers import Tokenizer as RawTokenizer

from aotllm.errors import EngineError
from aotllm.tokenization.byte_vocabulary import ByteVocabulary, is_markup
from aotllm.tokenization.library_errors import library_errors


class LibraryCodec:
    """See `Codec`. Raises EngineError where `tokenizer_json` is no tokenizer or decodes in an unsupported way."""

    def __init__(self, tokenizer_json: str) -> None:
        with library_errors(lambda why: EngineError(f"tokenizer.json cannot be read: {why}; rebuild the engine")):
            self.raw = RawTokenizer.from_str(tokenizer_json)
        # Settings for training batches; a prompt must come through whole.
        self.raw.no_truncation()
        self.raw.no_padding()
        added = self.raw.get_added_tokens_decoder()
        self.byte_vocabulary = ByteVocabulary(
            self.raw.id_to_token,
            [i for i, token in added.items() if token.special],
            [i for i, token in added.items() if is_markup(token.content, token.special)],
            None if self.raw.decoder is None else self.raw.decoder.__getstate__(),
        )

    @property
    def vocab_size(self) -> int:
        """See `Codec`."""
        return int(self.raw.get_vocab_size(with_added_tokens=True))

    def token_to_id(self, token: str) -> int | None:
        """See `Codec`."""
        return self.raw.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See `Codec`."""
        with library_errors(lambda why: EngineError(f"tokenizer.json is damaged: {why}; rebuild the engine")):
            return list(self.raw.encode(text, add_special_tokens=add_special_tokens).ids)
