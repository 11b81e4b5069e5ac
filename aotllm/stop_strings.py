"""`StopStrings`: finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Ends a streamed text at the first stop string, whatever pieces the text comes in.

    The stop string that *completes* earliest wins; of several that complete at the same character, the one listed
    first. Text is held back only while it may still become part of a stop string: the longest suffix of what was
    seen that is a proper prefix of one, no more.

    The strings are compiled to an Aho-Corasick automaton, so that a text of n characters costs O(n), however many and
    however repetitive the stop strings are. A state is a prefix of some stop string; being in a state means that the
    prefix is the longest one that the text seen so far ends with, and its length is what has to be held back.

    Args:
        stops: the stop strings, none of them empty; may be none at all.
        include: keep the matched stop string at the end of the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.matched: str | None = None
        """The stop string that ended the text; None while there is none"""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[int | None] = [None]  # state -> index of the first-listed stop string that ends here
        self._fail = [0]
        if any(not stop for stop in self._stops):
            raise ValueError("a stop string must not be empty")
        self._compile()

    def append(self, text: str, armed: bool = True) -> str:
        """The part of the text that is now safe to show. After a match: always empty.

        Args:
            armed: whether a stop string that `text` completes ends the text. One that completes unarmed is text like
                any other; one that merely starts unarmed still counts.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        for position in range(len(self._held), len(text)):
            self._state = self._step(self._state, text[position])
            match = self._match[self._state]
            if match is not None and not armed:
                self._state = self._unfinished(self._state)
            elif match is not None:
                self.matched = self._stops[match]
                self._held = ""
                end = position + 1
                return text[:end] if self._include else text[: end - len(self.matched)]
        safe = len(text) - self._depth[self._state]
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """End of the text: what was held back, which did not become a stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _compile(self) -> None:
        for index, stop in enumerate(self._stops):
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._match.append(None)
                    self._fail.append(0)
                state = self._next[state][char]
            if self._match[state] is None:
                self._match[state] = index
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fail = self._step(self._fail[state], char)
                self._fail[child] = fail
                both = [m for m in (self._match[child], self._match[fail]) if m is not None]
                self._match[child] = min(both, default=None)
                queue.append(child)

    def _unfinished(self, state: int) -> int:
        """The longest suffix of `state` that a stop string goes on from."""
        while state and not self._next[state]:
            state = self._fail[state]
        return state

    def _step(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][char]
