"""Text to ids and back: tokenizer, chat template, incremental detokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotllm.tokenization.detokenizer import IncrementalDetokenizer
from aotllm.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from aotllm.tokenization.chat_template import ChatTemplate

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer"]


def __getattr__(name: str) -> Any:
    if name == "ChatTemplate":  # with Jinja, which raw prompts do without
        from aotllm.tokenization.chat_template import ChatTemplate

        return ChatTemplate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
