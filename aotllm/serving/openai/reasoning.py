"""`ReasoningParser`: tells what a model thinks from what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aotllm.serving.openai.markers import find_first
from aotllm.serving.openai.pieces import Content, Piece, Reasoning

if TYPE_CHECKING:
    from aotllm.tokenization import Tokenizer

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class ReasoningMarkers:
    """What stands around the reasoning."""

    start: str
    end: str


_THINK = ReasoningMarkers("<think>", "</think>")

MARKERS: dict[str, ReasoningMarkers] = {
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
}
"""By the names that `--reasoning-parser` takes, besides auto and none"""


def reasoning_markers(option: str, chat_template: str | None) -> ReasoningMarkers | None:
    """The markers that `--reasoning-parser` stands for; None = all text is the answer. `auto` goes by what the chat
    template writes."""
    if option == "none":
        return None
    if option != "auto":
        return MARKERS[option]
    template = chat_template or ""
    return next((markers for markers in MARKERS.values() if markers.end in template), None)


def opened_by_prompt(markers: ReasoningMarkers, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
    """Whether the prompt ends with the start marker, so that the answer begins in the middle of the reasoning."""
    # A token is a byte at least, and white space may follow the marker.
    tail = tokenizer.decode(prompt_token_ids[-len(markers.start) - 8 :], skip_special_tokens=False)
    return tail.rstrip(_SPACE).endswith(markers.start)


class ReasoningParser:
    """Reasoning comes first: it begins the answer with its start marker, or was begun by the prompt. White space around
    it is dropped. What comes after the end marker is content, and so is all text where nothing is marked.

    Args:
        markers: what stands around it.
        opened: the prompt has begun it.
    """

    def __init__(self, markers: ReasoningMarkers, opened: bool) -> None:
        self._markers = markers
        self._state: Literal["before", "start", "reasoning", "after", "content"] = "start" if opened else "before"
        self._text = ""
        self._space: list[str] = []
        """White space within the reasoning, unless nothing more comes"""
        self._said = False

    def push(self, text: str) -> list[Piece]:
        """More text; returns what is sure now."""
        if self._state == "content":
            return [Content(text)] if text else []
        self._text += text
        pieces: list[Piece] = []
        while self._text and self._step(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """The answer is over; returns the rest."""
        text, self._text = self._text, ""
        if self._state == "before":
            return [Content(text)] if text else []
        # The space at the end of reasoning is dropped, cut markers are not.
        return [Reasoning("".join([*self._space, text]))] if text.strip(_SPACE) else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Take something from the front of the text; False where more is needed to know what it is."""
        if self._state in ("before", "start"):
            return self._at_start()
        if self._state == "reasoning":
            return self._in_reasoning(pieces)
        if self._state == "after":
            self._text = self._text.lstrip(_SPACE)
            if not self._text:
                return False
            self._state = "content"
        pieces.append(Content(self._text))
        self._text = ""
        return False

    def _at_start(self) -> bool:
        body = self._text.lstrip(_SPACE)
        if body.startswith(self._markers.start):
            self._text = body[len(self._markers.start) :]
            self._state = "reasoning"
        elif self._markers.start.startswith(body):
            return False
        else:
            self._state = "reasoning" if self._state == "start" else "content"
            self._text = body if self._state == "reasoning" else self._text
        return True

    def _in_reasoning(self, pieces: list[Piece]) -> bool:
        at, end = find_first(self._text, [self._markers.end])
        text = self._text[:at] if self._said else self._text[:at].lstrip(_SPACE)
        body = text.rstrip(_SPACE)
        if body:
            self._said = True
            pieces.append(Reasoning("".join([*self._space, body])))
            self._space.clear()
        self._space.append(text[len(body) :])
        self._text = self._text[at:]
        if end is None:
            return False
        self._text = self._text[len(end) :]
        self._state = "after"
        return True


def count_reasoning_tokens(
    markers: ReasoningMarkers, tokenizer: Tokenizer, token_ids: Sequence[int], opened: bool
) -> int:
    """How many of an answer's tokens are reasoning, markers included: all up to the end marker."""
    from aotllm.tokenization import IncrementalDetokenizer

    if not opened and not tokenizer.decode(token_ids[: len(markers.start) + 8], skip_special_tokens=False).lstrip(
        _SPACE
    ).startswith(markers.start):
        return 0
    end = tokenizer.token_to_id(markers.end)
    if end is not None and end in token_ids:
        return list(token_ids).index(end) + 1
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    tail = ""
    for count, token_id in enumerate(token_ids, start=1):
        tail += detokenizer.append([token_id])
        if markers.end in tail:
            return count
        tail = tail[-len(markers.end) :]
    return len(token_ids)
