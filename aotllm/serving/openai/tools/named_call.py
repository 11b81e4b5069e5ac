"""`NamedCallParser`: the whole answer is the arguments of one function, as a grammar has seen to."""

from __future__ import annotations

from collections.abc import Collection

from aotllm.serving.openai.pieces import CallArguments, CallStart, Piece
from aotllm.serving.openai.tools.base import ToolParser


class NamedCallParser(ToolParser):
    """Of an answer to `tool_choice` that names its function, the only one of `names`."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        (self._name,) = names

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser.push`."""
        if not text:
            return []
        pieces: list[Piece] = [] if self._calls else [CallStart(0, self._name)]
        self._calls = 1
        return [*pieces, CallArguments(0, text)]

    def flush(self) -> list[Piece]:
        """See `ToolParser.flush`."""
        return []
