"""Text to ids and back: tokenizer, chat template, incremental detokenizer."""

from aotllm.tokenization.chat_template import ChatTemplate
from aotllm.tokenization.detokenizer import IncrementalDetokenizer
from aotllm.tokenization.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer"]
