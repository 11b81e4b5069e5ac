"""`MistralParser`: `[TOOL_CALLS][{"name": …, "arguments": …}]`, and the newer `[TOOL_CALLS]name{…}`."""

from __future__ import annotations

import re
import secrets
import string

from aotllm.serving.openai.tools.base import ToolParser
from aotllm.serving.openai.tools.json_value import WHITESPACE, JsonValue

_START, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:/-]+")
_HEAD_END = re.compile(r"[^\w.:/-]")


class MistralParser(ToolParser):
    """Calls follow the marker: an array of objects, or name and arguments, with `[CALL_ID]` and `[ARGS]` between them
    in some models."""

    markers = (_START, _ID, _ARGUMENTS)

    _in_array = False
    _value: JsonValue | None = None

    @staticmethod
    def call_id() -> str:
        """Nine letters or digits: the templates insist."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _in_text(self) -> bool:
        if not self._passes(_START):
            return False
        self._in_array = False
        self._step = self._opened
        return True

    def _opened(self) -> bool:
        if not self._hold_space():
            return False
        if self._text[0] == "{":
            self._begin_object(None)
        elif self._text[0] == "[" and not self._in_array:
            # Either the array, or the marker once more.
            if (again := self._sees(_START)) is None:
                return False
            if again:
                return self._no_call()
            self._hold(1)
            self._in_array = True
        elif not self._in_array and _NAME.match(self._text):
            self._step = self._named
        else:
            return self._no_call()
        return True

    def _named(self) -> bool:
        head = self._head()
        if head is None:
            return False
        name, length = head
        if not name:
            return self._no_call()
        self._cut(length)
        self._begin_call(name)
        self._value = JsonValue()
        self._step = self._in_arguments
        return True

    def _head(self) -> tuple[str, int] | None:
        """The name, and where the arguments begin behind it; "" if they do not; None if that is not known yet."""
        end = _HEAD_END.search(self._text)
        if end is None:
            return ("", 0) if self._final else None
        name, at = self._text[: end.start()], end.start()
        for marker in (_ID, _ARGUMENTS):
            here = self._text[at:].lstrip(WHITESPACE)
            if here.startswith(marker):
                at = len(self._text) - len(here) + len(marker)
                if marker == _ID:
                    given = self._text[at:].lstrip(WHITESPACE)
                    end = _HEAD_END.search(given)
                    if end is None:
                        return ("", 0) if self._final else None
                    at = len(self._text) - len(given) + end.start()
            elif marker.startswith(here) and not self._final:
                return None
        here = self._text[at:].lstrip(WHITESPACE)
        if not here:
            return ("", 0) if self._final else None
        return (name if here[0] == "{" else ""), len(self._text) - len(here)

    def _in_arguments(self) -> bool:
        assert self._value is not None
        length = self._value.feed(self._text, 0)
        ended = self._value.done or self._value.broken
        if not ended and self._final:
            length = len(self._text)
        if length:
            self._add_arguments(self._cut(length))
        if not ended:
            return False
        self._step = self._in_text
        return True

    def _after_call(self) -> bool:
        if not self._in_array:
            self._step = self._in_text
            return True
        self._hold(len(self._text) - len(self._text.lstrip(WHITESPACE + ",")))
        if not self._text:
            return False
        if self._text[0] == "{":
            self._begin_object(None)
            return True
        if self._text[0] == "]":
            self._cut(1)
            self._held = ""
        else:
            self._give_up()
        self._step = self._in_text
        return True
