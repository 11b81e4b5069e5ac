"""`Llama3JsonParser`: `{"name": …, "parameters": …}`, of Llama 3.1 and later."""

from __future__ import annotations

from collections.abc import Collection

from aotllm.serving.openai.tools.base import ToolParser
from aotllm.serving.openai.tools.json_value import WHITESPACE

_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """A call is the whole answer: it begins it, or follows the tag. Several are separated by `;`."""

    markers = (_TAG,)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._step = self._at_start

    def _at_start(self) -> bool:
        if not self._hold_space():
            return False
        if self._text[0] == "{":
            self._begin_object(self._names)
        else:
            return self._no_call()
        return True

    def _in_text(self) -> bool:
        if not self._passes(_TAG):
            return False
        self._step = self._tagged
        return True

    def _tagged(self) -> bool:
        if not self._hold_space():
            return False
        if self._text[0] == "{":
            self._begin_object(None)
        else:  # code for an interpreter, which follows the tag as well
            self._give_up()
            self._step = self._in_text
        return True

    def _after_call(self) -> bool:
        self._hold(len(self._text) - len(self._text.lstrip(WHITESPACE + ";,")))
        if not self._text:
            return False
        if self._text[0] == "{":
            self._begin_object(self._names)
            return True
        tagged = self._sees(_TAG)
        if tagged is None:
            return False
        if not tagged:
            self._give_up()
        self._step = self._in_text
        return True
