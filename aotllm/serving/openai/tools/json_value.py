"""`JsonValue`: finds the end of one JSON value in text that comes in pieces."""

from __future__ import annotations

import re

WHITESPACE = " \t\r\n"

_STRING_END = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]|[^"{}\[\]\w\s,:.+-]')
"""Outside of strings: what nests, and what no JSON has"""
_SCALAR_END = re.compile(r"[^\w.+-]")


class JsonValue:
    """Brackets and strings are followed, what stands between them is not checked: it is the client who parses.

    Attributes:
        done: the end has been found.
        broken: it never will be, since there is a character that cannot be part of a JSON value.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._in_scalar = False

    def feed(self, text: str, start: int) -> int:
        """How far the value reaches from `text[start]` on: `len(text)` if it may go on, else where it ends.

        A backslash at the end of the text is left for the next piece. The first character of all is no white space.
        """
        at = start
        while at < len(text) and not (self.done or self.broken):
            if self._in_string:
                at = self._string(text, at)
                if at < 0:
                    return len(text) - 1
            elif self._in_scalar:
                at = self._scalar(text, at)
            elif self._depth:
                at = self._inside(text, at)
            else:
                at = self._first(text, at)
        return at

    def _first(self, text: str, at: int) -> int:
        char = text[at]
        if char in "{[":
            self._depth = 1
        elif char == '"':
            self._in_string = True
        elif _SCALAR_END.match(char):
            self.broken = True
            return at
        else:
            self._in_scalar = True
        return at + 1

    def _inside(self, text: str, at: int) -> int:
        found = _STRUCTURE.search(text, at)
        if found is None:
            return len(text)
        char = found[0]
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        else:
            self.broken = True
            return found.start()
        return found.end()

    def _string(self, text: str, at: int) -> int:
        found = _STRING_END.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            return found.end() + 1 if found.end() < len(text) else -1
        self._in_string = False
        self.done = self._depth == 0
        return found.end()

    def _scalar(self, text: str, at: int) -> int:
        found = _SCALAR_END.search(text, at)
        if found is None:
            return len(text)
        self.done = True
        return found.start()
