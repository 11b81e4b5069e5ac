"""`ToolParser`: finds tool calls in the text of an answer, as it comes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from typing import ClassVar

from aotllm.serving.openai.markers import find_first
from aotllm.serving.openai.pieces import CallArguments, CallStart, Content, Piece
from aotllm.serving.openai.tools.call_object import CallObject
from aotllm.serving.openai.tools.json_value import WHITESPACE

Step = Callable[[], bool]
"""Takes something from the front of the text; False where more text is needed to know what it is"""


class ToolParser:
    """What all forms of calls share.

    A parser never looks at where its text was cut: the pieces of any cutting add up to the same content and calls. It
    never fails. Text that turns out to be no call is content, markers included, so nothing that the model said is lost
    but the markup of calls and white space beside them. A call that breaks off in the middle keeps what there is of it.

    Args:
        names: the functions of the request.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that the parser has to see though vocabularies may have them as special tokens"""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._text = ""
        """Not looked at yet"""
        self._held = ""
        """Taken, and content unless a call follows"""
        self._space: list[str] = []
        """White space at the end of the content: dropped before a call"""
        self._object: CallObject | None = None
        self._started = False
        self._calls = 0
        self._final = False
        self._pieces: list[Piece] = []
        self._step: Step = self._in_text

    @staticmethod
    def call_id() -> str:
        """A new id for a call, as the model's chat template takes it."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def push(self, text: str) -> list[Piece]:
        """More text; returns what is sure now."""
        self._text += text
        return self._run()

    def flush(self) -> list[Piece]:
        """The answer is over; returns the rest."""
        self._final = True
        pieces = self._run()
        if self._step == self._after_call:
            self._held = ""  # what separates calls, though no other one has come
        if self._object is not None:
            self._object.finish()
            self._take_from(self._object)
        self._give_up(self._text)
        self._text = ""
        if not self._calls and (space := "".join(self._space)):
            self._pieces.append(Content(space))
        return pieces + self._taken_pieces()

    def _run(self) -> list[Piece]:
        while self._text and self._step():
            pass
        return self._taken_pieces()

    def _taken_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # For the parsers of the forms -------------------------------------------------------------------------------------

    def _in_text(self) -> bool:
        """Step: content, until a call may begin."""
        raise NotImplementedError

    def _after_call(self) -> bool:
        """Step: an object has ended."""
        raise NotImplementedError

    def _passes(self, marker: str) -> bool:
        """Say what comes before `marker`, and hold the marker; False where it has not come."""
        at, found = find_first(self._text, [marker])
        if at:
            self._say(self._cut(at))
        if found is None:
            return False
        self._hold(len(marker))
        return True

    def _cut(self, length: int) -> str:
        """Take from the front of the text."""
        cut, self._text = self._text[:length], self._text[length:]
        return cut

    def _hold(self, length: int) -> None:
        """Take text that is content unless a call follows."""
        self._held += self._cut(length)

    def _hold_space(self) -> bool:
        """Hold white space; False if no other text is left."""
        self._hold(len(self._text) - len(self._text.lstrip(WHITESPACE)))
        return bool(self._text)

    def _sees(self, marker: str) -> bool | None:
        """Whether the text begins with `marker`; None where that is not known yet."""
        if self._text.startswith(marker):
            return True
        return None if marker.startswith(self._text) and not self._final else False

    def _say(self, text: str) -> None:
        """This is content."""
        content = text.rstrip(WHITESPACE)
        if content:
            self._pieces.append(Content("".join([*self._space, content])))
            self._space.clear()
        self._space.append(text[len(content) :])

    def _no_call(self) -> bool:
        """What is held is content, which goes on; the step is done."""
        self._give_up()
        self._step = self._in_text
        return True

    def _give_up(self, text: str = "") -> None:
        """What is held, and `text` behind it, is no call."""
        held, self._held = self._held, ""
        self._say(held + text)

    def _begin_object(self, names: Collection[str] | None) -> None:
        """An object begins that is a call: of any function after a marker (None), else of one of `names`."""
        self._object = CallObject(names)
        self._started = False
        self._step = self._in_object

    def _in_object(self) -> bool:
        assert self._object is not None
        self._text = self._object.feed(self._text)
        self._take_from(self._object)
        return True

    def _take_from(self, call: CallObject) -> None:
        if call.name is not None and not self._started:
            self._started = True
            self._begin_call(call.name)
        if arguments := call.take_arguments():
            self._add_arguments(arguments)
        if call.refused:
            self._object = None
            self._step = self._in_text
            self._refuse(call.raw)
        elif call.ended:
            self._object = None
            self._step = self._after_call

    def _refuse(self, text: str) -> None:
        """An object is no call."""
        self._give_up(text)

    def _begin_call(self, name: str) -> None:
        self._held = ""
        self._space.clear()
        self._pieces.append(CallStart(self._calls, name))
        self._calls += 1

    def _add_arguments(self, text: str) -> None:
        self._pieces.append(CallArguments(self._calls - 1, text))
