"""`Conversation`: what a simulated user says, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    text: str


@dataclass(frozen=True)
class Turn:
    """One request: what is said, and how long the answer may be."""

    text: str
    input_len: int
    """Tokens that `text` was made to have; 0 = not known"""
    output_len: int
    """`max_tokens`"""


@dataclass(frozen=True)
class Conversation:
    """Turns that are asked one after the other, each with all that was said before."""

    turns: tuple[Turn, ...]
    system: str = ""
    system_len: int = 0
    """Tokens that `system` was made to have"""


class History:
    """The state of a conversation: what was said so far, answers of the server included."""

    def __init__(self, conversation: Conversation) -> None:
        self.messages: list[Message] = []
        self.num_tokens = conversation.system_len
        """As wanted for our texts and as measured for answers"""
        if conversation.system:
            self.messages.append(Message("system", conversation.system))

    def ask(self, turn: Turn) -> None:
        """The user says the text of a turn."""
        self.messages.append(Message("user", turn.text))
        self.num_tokens += turn.input_len

    def answer(self, text: str, num_tokens: int) -> None:
        """The server has answered."""
        self.messages.append(Message("assistant", text))
        self.num_tokens += num_tokens


def plain_text(messages: Sequence[Message]) -> str:
    """Messages as one prompt, for servers of plain completions. The prompt of a turn starts with that of the turn
    before and its answer, so that prefix caches work as they do with a chat template."""
    parts: list[str] = []
    for message in messages:
        if parts and message.role != "assistant":
            parts.append("\n\n")
        parts.append(message.text)
    return "".join(parts)
