"""`JsonParser`: calls as plain JSON, for models that were taught no form of their own."""

from __future__ import annotations

import re
from collections.abc import Collection

from aotllm.serving.openai.tools.base import ToolParser
from aotllm.serving.openai.tools.json_value import WHITESPACE

_FENCE = "```"
_OPEN_FENCE = re.compile(r"```[\w-]*[ \t]*(?:\n|\Z)")


class JsonParser(ToolParser):
    """An object with the name of one of the functions, or an array of such objects, at the beginning of a line,
    perhaps inside a Markdown fence. Content may stand around it."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._in_array = False
        self._fenced = False
        self._step = self._at_line_start

    def _at_line_start(self) -> bool:
        if not self._hold_space():
            return False
        if self._text[0] != "`":
            return self._opened()
        fence = self._sees(_FENCE)
        if fence is None:
            return False
        opening = _OPEN_FENCE.match(self._text) if fence else None
        if opening is None:
            return self._no_call()
        if not opening[0].endswith("\n"):
            return self._no_call() if self._final else False
        self._hold(opening.end())
        self._fenced = True
        self._step = self._opened
        return True

    def _opened(self) -> bool:
        """Where a call would begin."""
        if not self._hold_space():
            return False
        if self._text[0] == "{":
            self._begin_object(self._names)
        elif self._text[0] == "[" and not self._in_array:
            self._hold(1)
            self._in_array = True
            self._step = self._opened
        else:
            return self._no_call()
        return True

    def _no_call(self) -> bool:
        self._refuse("")
        self._step = self._in_text
        return True

    def _refuse(self, text: str) -> None:
        self._in_array = self._fenced = False
        super()._refuse(text)

    def _in_text(self) -> bool:
        end = self._text.find("\n") + 1
        self._say(self._cut(end or len(self._text)))
        if end:
            self._step = self._at_line_start
        return True

    def _after_call(self) -> bool:
        self._hold(len(self._text) - len(self._text.lstrip(WHITESPACE + ",;")))
        if not self._text:
            return False
        if self._text[0] == "{":
            self._begin_object(self._names)
            return True
        if self._text[0] == "]" and self._in_array:
            self._cut(1)
            self._held, self._in_array = "", False
            return True
        closes = self._sees(_FENCE) if self._fenced else False
        if closes is None:
            return False
        if not closes and not (self._fenced and self._final and _FENCE.startswith(self._text)):
            return self._no_call()
        self._cut(len(_FENCE))
        self._held, self._fenced = "", False
        self._step = self._in_text
        return True
