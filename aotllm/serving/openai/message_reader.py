"""`MessageReader`: an answer's text as reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aotllm.request import RequestOutput
from aotllm.serving.openai.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from aotllm.serving.openai.reasoning import (
    ReasoningMarkers,
    ReasoningParser,
    count_reasoning_tokens,
    opened_by_prompt,
)
from aotllm.serving.openai.tools.base import ToolParser

if TYPE_CHECKING:
    from aotllm.tokenization import Tokenizer


_BLOCK = 1024
"""Characters"""


@dataclass(frozen=True)
class MessageForm:
    """What the answers to a request may be made of besides content."""

    reasoning: ReasoningMarkers | None = None
    include_reasoning: bool = True
    calls: Callable[[], ToolParser] | None = None
    """Makes the parser of one answer's calls"""
    call_id: Callable[[], str] = ToolParser.call_id
    one_call: bool = False
    """Calls after the first one are left out"""
    ends_with_calls: bool = False
    """An answer with calls ends for the reason tool_calls"""

    @property
    def plain(self) -> bool:
        """Content only: there is nothing to look for."""
        return self.reasoning is None and self.calls is None

    @property
    def shown_special_tokens(self) -> tuple[str, ...]:
        """What has to be in the text although special tokens are skipped."""
        calls = self.calls().markers if self.calls is not None else ()
        return calls if self.reasoning is None else (*calls, self.reasoning.start, self.reasoning.end)

    def opened(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
        """The prompt has begun the reasoning."""
        return self.reasoning is not None and opened_by_prompt(self.reasoning, tokenizer, prompt_token_ids)

    def reasoning_tokens(self, tokenizer: Tokenizer, result: RequestOutput) -> int:
        """Of all answers of a finished request together."""
        if self.reasoning is None:
            return 0
        opened = self.opened(tokenizer, result.prompt_token_ids)
        answers = [output.token_ids for output in result.outputs]
        return sum(count_reasoning_tokens(self.reasoning, tokenizer, token_ids, opened) for token_ids in answers)


class MessageReader:
    """Reads one answer. The pieces of a text are the same, put together, however it is cut.

    Args:
        form: what to look for.
        opened: the prompt has begun the reasoning.
    """

    def __init__(self, form: MessageForm, opened: bool) -> None:
        self._form = form
        self._reasoning = ReasoningParser(form.reasoning, opened) if form.reasoning is not None else None
        self._calls = form.calls() if form.calls is not None else None
        self.has_calls = False

    def push(self, text: str) -> list[Piece]:
        """More text; returns what is sure now."""
        if self._reasoning is None:
            return self._shown(self._split([Content(text)]))
        return self._shown(self._split(self._reasoning.push(text)))

    def read(self, text: str) -> list[Piece]:
        """A whole answer."""
        # In blocks: parsers cut from the front of what they have, which long texts would make slow.
        blocks = [text[start : start + _BLOCK] for start in range(0, len(text), _BLOCK)]
        return [piece for block in blocks for piece in self.push(block)] + self.flush()

    def flush(self) -> list[Piece]:
        """The answer is over; returns the rest."""
        pieces = self._split(self._reasoning.flush()) if self._reasoning is not None else []
        return self._shown(pieces + (self._calls.flush() if self._calls is not None else []))

    def _split(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Content that holds calls, into both."""
        if self._calls is None:
            return list(pieces)
        split: list[Piece] = []
        for piece in pieces:
            split += self._calls.push(piece.text) if isinstance(piece, Content) else [piece]
        return split

    def _shown(self, pieces: Sequence[Piece]) -> list[Piece]:
        shown = [piece for piece in pieces if self._shows(piece)]
        self.has_calls = self.has_calls or any(isinstance(piece, CallStart) for piece in shown)
        return shown

    def _shows(self, piece: Piece) -> bool:
        if isinstance(piece, Reasoning):
            return self._form.include_reasoning
        if isinstance(piece, Content):
            return bool(piece.text)
        return piece.index == 0 or not self._form.one_call


def delta(piece: Piece, call_id: Callable[[], str]) -> dict[str, Any]:
    """`choices[].delta` of a piece."""
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return reasoning_fields(piece.text)
    if isinstance(piece, CallStart):
        call = {"index": piece.index, **_call(call_id(), piece.name, "")}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def reasoning_fields(text: str) -> dict[str, str]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass
class _Parts:
    """Pieces put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, list[str]]] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Content):
            self.content += piece.text
        elif isinstance(piece, Reasoning):
            self.reasoning += piece.text
        elif isinstance(piece, CallStart):
            self.calls.append((piece.name, []))
        elif isinstance(piece, CallArguments):
            self.calls[piece.index][1].append(piece.text)


def message_fields(pieces: Sequence[Piece], call_id: Callable[[], str]) -> dict[str, Any]:
    """`choices[].message` without its role: what its pieces say together."""
    parts = _Parts()
    for piece in pieces:
        parts.add(piece)
    fields: dict[str, Any] = {"content": parts.content or None if parts.calls else parts.content}
    if parts.reasoning:
        fields |= reasoning_fields(parts.reasoning)
    if parts.calls:
        fields["tool_calls"] = [_call(call_id(), name, "".join(texts)) for name, texts in parts.calls]
    return fields
