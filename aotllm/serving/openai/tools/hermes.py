"""`HermesParser`: `<tool_call>{"name": …, "arguments": …}</tool_call>`, of Hermes, Qwen and others."""

from __future__ import annotations

from aotllm.serving.openai.tools.base import ToolParser

_START, _END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Content may stand before, between and after calls."""

    markers = (_START, _END)

    def _in_text(self) -> bool:
        if not self._passes(_START):
            return False
        self._step = self._opened
        return True

    def _opened(self) -> bool:
        if not self._hold_space():
            return False
        if self._text[0] == "{":
            self._begin_object(None)
        else:
            return self._no_call()
        return True

    def _after_call(self) -> bool:
        if not self._hold_space():
            return False
        closes = self._sees(_END)
        if closes is None:
            return False
        if closes or (self._final and _END.startswith(self._text)):
            self._cut(len(_END))
            self._held = ""
            self._step = self._in_text
        elif self._text[0] == "{":
            self._begin_object(None)
        else:
            return self._no_call()
        return True
