"""`Tokenizer`: text and chats to ids, ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aotllm.errors import ContextTooLong, EngineError, InvalidRequest
from aotllm.tokenization.byte_vocabulary import ByteVocabulary

if TYPE_CHECKING:
    from aotllm.tokenization.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
TOKENS_FILE = "tokenizer.tokens"
CHAT_TEMPLATE_FILE = "chat_template.jinja"

_SHRINKS = 2
"""A normalizer (NFC, NFKC) may make fewer characters of a text, though hardly half as many"""


class Codec(Protocol):
    """What makes ids of texts: the library by `tokenizer.json`, or the runtime by `tokenizer.tokens`."""

    byte_vocabulary: ByteVocabulary

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text that is valid UTF-8. Raises EngineError where the files are damaged."""


class Tokenizer:
    """The tokenizer of an engine. Immutable and safe to share between threads.

    Decoding reads the concatenated bytes of the tokens as UTF-8. Invalid bytes become U+FFFD: one per ill-formed
    subsequence for byte-level vocabularies, one per byte for SentencePiece ones, each like its original.
    """

    def __init__(
        self,
        tokenizer_json: str,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        """Raises EngineError where `tokenizer_json` is no tokenizer or decodes in an unsupported way."""
        from aotllm.tokenization.library_codec import LibraryCodec

        self._set(LibraryCodec(tokenizer_json), chat_template, bos_token, eos_token)

    def _set(self, codec: Codec, chat_template: str | None, bos_token: str | None, eos_token: str | None) -> None:
        self._codec = codec
        self.byte_vocabulary = codec.byte_vocabulary
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token

    @classmethod
    def from_codec(
        cls, codec: Codec, chat_template: str | None = None, bos_token: str | None = None, eos_token: str | None = None
    ) -> Tokenizer:
        """A tokenizer whose ids come from `codec`."""
        tokenizer = cls.__new__(cls)
        tokenizer._set(codec, chat_template, bos_token, eos_token)
        return tokenizer

    @classmethod
    def from_folder(cls, folder: Path, bos_token: str | None = None, eos_token: str | None = None) -> Tokenizer:
        """Read `tokenizer.tokens`, or where there is none `tokenizer.json`, and `chat_template.jinja` if there is one.
        Raises EngineError."""
        try:
            template = folder / CHAT_TEMPLATE_FILE
            chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
            if (codec := _compact_codec(folder / TOKENS_FILE)) is not None:
                return cls.from_codec(codec, chat_template, bos_token, eos_token)
            tokenizer_json = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise EngineError(f"{folder.name}: {TOKENIZER_FILE} or {CHAT_TEMPLATE_FILE}: {reason}") from None
        return cls(tokenizer_json, chat_template, bos_token, eos_token)

    @property
    def vocab_size(self) -> int:
        """Number of tokens. A model's logits may be wider, where its vocabulary is padded."""
        return self._codec.vocab_size

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it, or None."""
        return self._codec.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character; empty for ids without a token."""
        return self.byte_vocabulary.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode(skip_special_tokens=True)` hides the token."""
        return self.byte_vocabulary.is_special(token_id)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, param: str = "prompt", limit: int | None = None
    ) -> list[int]:
        """Ids of `text`, framed by BOS/EOS where the model asks for it and `add_special_tokens` is set.

        Special tokens that are spelled out in `text` are recognized. `param` names the field of the request that `text`
        came in, for the error. A text that is so long that it must have more than `limit` tokens is not even looked
        at, since that takes seconds per MB.

        Raises:
            ContextTooLong: it must have more than `limit` tokens; one that turns out to have more is returned.
            InvalidRequest: `text` holds a lone surrogate, which no UTF-8 text can.
            EngineError: the library fails, which only a damaged tokenizer makes it do.
        """
        if limit is not None:
            self._check_length(text, limit, param)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}; "
                "send complete characters",
                param,
            ) from None
        return self._codec.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids without a token add nothing."""
        data = self.byte_vocabulary.join(ids, skip_special_tokens)
        if self.byte_vocabulary.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors=self.byte_vocabulary.errors)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text for `messages`; see `ChatTemplate.render`. `chat_template` stands in for the model's own.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        template = self._template if chat_template is None else _compile(chat_template, "chat_template")
        if template is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot take messages; send a raw prompt instead "
                "(the completions endpoint, or `aotllm run --raw`)",
                "messages",
            )
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            **kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = False,
        chat_template: str | None = None,
        limit: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of the prompt for `messages`.

        The template is the whole prompt: BOS is there if the template writes it. `add_special_tokens` frames the
        prompt as `encode` does, for templates that leave BOS out; a prompt that already begins with BOS gets no second.
        """
        prompt = self.apply_chat_template(messages, add_generation_prompt, tools, chat_template, **kwargs)
        if self.bos_token and prompt.startswith(self.bos_token):
            add_special_tokens = False
        return self.encode(prompt, add_special_tokens=add_special_tokens, param="messages", limit=limit)

    def _check_length(self, text: str, limit: int, param: str) -> None:
        # A character is at least a byte. The longest token is looked for only where it may matter.
        if len(text) <= limit * 16 or len(text) <= limit * self._longest_token * _SHRINKS:
            return
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens. However, the prompt has {len(text)} characters, "
            f"which are more tokens than that in any case. Shorten the prompt.",
            param,
        )

    @cached_property
    def _longest_token(self) -> int:
        """In bytes."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    @cached_property
    def _template(self) -> ChatTemplate | None:
        # Compiled on first use: a template that does not compile spoils chats, not raw prompts.
        return _compile(self.chat_template) if self.chat_template is not None else None


def _compile(source: str, param: str | None = None) -> ChatTemplate:
    from aotllm.tokenization.chat_template import ChatTemplate  # with Jinja, which raw prompts do without

    return ChatTemplate(source, param=param)


def _compact_codec(path: Path) -> Codec | None:
    """None where there are no tables, or no runtime that reads them."""
    if not path.is_file():
        return None
    try:
        from aotllm.tokenization.compact_codec import CompactCodec
    except ImportError:
        return None
    return CompactCodec(path)
