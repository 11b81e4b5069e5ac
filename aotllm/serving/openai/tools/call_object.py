"""`CallObject`: reads one `{"name": …, "arguments": …}` as it comes."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

from aotllm.serving.openai.tools.json_value import WHITESPACE, JsonValue

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "index")
"""What models add to calls without harm"""

_Expected = Literal["brace", "first key", "key", "colon", "value", "comma"]


class CallObject:
    """Knows as early as possible whether an object is a call, and hands the text of its arguments out as it comes.

    Args:
        names: functions that it may call, where nothing but the object itself says that it is a call; None = any.

    Attributes:
        name: of the function, once it is sure that this is a call.
        refused: this is no call.
        ended: nothing more belongs to it: it is complete, or it breaks off in the middle.
        raw: all text that it has taken.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self.name: str | None = None
        self.refused = False
        self.ended = False
        self._names = names
        self._expected: _Expected = "brace"
        self._rest = ""
        self._taken: list[str] = []
        self._key: str | None = None
        self._value: JsonValue | None = None
        self._value_text: list[str] = []
        self._known_name: str | None = None
        self._has_arguments = False
        self._streams = False
        self._fragments: list[str] = []

    @property
    def raw(self) -> str:
        """See above."""
        return "".join(self._taken)

    def feed(self, text: str) -> str:
        """Take more text; returns what does not belong to the object (nothing, unless it has ended or is refused)."""
        self._rest += text
        while self._rest and not (self.ended or self.refused) and self._advance():
            pass
        if not (self.ended or self.refused):
            return ""
        rest, self._rest = self._rest, ""
        return rest

    def finish(self) -> None:
        """The text is over."""
        rest = self._take(len(self._rest))
        if self._streams:
            self._fragments.append(rest)
        self._break_off()

    def take_arguments(self) -> str:
        """The text of the arguments that is new since the last call. Empty before `name` is set."""
        if self.name is None:
            return ""
        text = "".join(self._fragments)
        self._fragments.clear()
        return text

    def _advance(self) -> bool:
        """Take what comes next; False where more text is needed for that."""
        if self._value is not None:
            return self._go_on_with_value(self._value)
        char = self._rest[0]
        if char in WHITESPACE:
            self._take(len(self._rest) - len(self._rest.lstrip(WHITESPACE)))
        elif self._expected == "brace" and char == "{":
            self._take(1)
            self._expected = "first key"
        elif self._expected in ("first key", "comma") and char == "}":
            self._take(1)
            self._complete()
        elif self._expected in ("first key", "key") and char == '"':
            self._key, self._value = None, JsonValue()
        elif self._expected == "colon" and char == ":":
            self._take(1)
            self._expected = "value"
        elif self._expected == "comma" and char == ",":
            self._take(1)
            self._expected = "key"
        elif self._expected == "value":
            self._begin_value(char)
        else:
            self._break_off()
        return True

    def _take(self, length: int) -> str:
        text, self._rest = self._rest[:length], self._rest[length:]
        self._taken.append(text)
        return text

    def _begin_value(self, first: str) -> None:
        self._value = JsonValue()
        # Arguments that are an object are handed out as they are; other kinds have to be looked at as a whole.
        self._streams = self._key in _ARGUMENT_KEYS and not self._has_arguments and first == "{"
        if self._streams:
            self._has_arguments = True
            self._decide()

    def _go_on_with_value(self, value: JsonValue) -> bool:
        length = value.feed(self._rest, 0)
        text = self._take(length)
        (self._fragments if self._streams else self._value_text).append(text)
        if value.broken:
            self._break_off()
        if not value.done:
            return value.broken
        self._value = None
        whole = "".join(self._value_text)
        self._value_text.clear()
        if self._streams:
            self._streams = False
            self._expected = "comma"
        elif self._expected == "value":
            self._expected = "comma"
            self._end_value(whole)
        else:
            self._end_key(whole)
        return True

    def _end_key(self, text: str) -> None:
        self._expected = "colon"
        key = _parsed(text)
        self._key = key if isinstance(key, str) else None
        # Without a marker before it, an object with other keys is just an answer.
        expected = (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS)
        if self._names is not None and self.name is None and self._key not in expected:
            self.refused = True

    def _end_value(self, text: str) -> None:
        value = _parsed(text)
        if self._key in _NAME_KEYS and self._known_name is None and isinstance(value, str):
            if value == "" or (self._names is not None and value not in self._names):
                self.refused = True
                return
            self._known_name = value
            self._decide()
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments and value is not None:
            self._has_arguments = True
            # Some models write the arguments as a string that holds JSON.
            self._fragments.append(value if isinstance(value, str) else text)
            self._decide()

    def _decide(self) -> None:
        if self._known_name is not None and self._has_arguments:
            self.name = self._known_name

    def _complete(self) -> None:
        if self._known_name is None:
            self.refused = True
            return
        if not self._has_arguments:
            self._fragments.append("{}")
        self.name, self.ended = self._known_name, True

    def _break_off(self) -> None:
        if self.name is None:
            self.refused = True
        else:
            self.ended = True


def _parsed(text: str) -> object:
    """The value of a JSON text, or None where it is none."""
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value
