"""Files of conversations and prompts: ShareGPT's form, OpenAI messages, or lines with a `prompt`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aotllm.bench.conversation import Conversation, Turn
from aotllm.errors import InvalidRequest

CountTokens = Callable[[str], int]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class DatasetConversations:
    """The conversations of a file in an order that the seed decides, again from the start when all were had."""

    def __init__(self, conversations: Sequence[Conversation], seed: int) -> None:
        self._conversations = list(conversations)
        random.Random(f"{seed}:dataset").shuffle(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[index % len(self._conversations)]

    def __len__(self) -> int:
        return len(self._conversations)


def read_dataset(path: Path, *, count: CountTokens, output_len: int | None, multi_turn: bool) -> list[Conversation]:
    """All usable entries of a JSON list or of JSON lines.

    An entry is `{"conversations": [{"from": "human" | "gpt" | "system", "value": text}, …]}` (ShareGPT),
    `{"messages": [{"role", "content"}, …]}`, or `{"prompt": text, "output_len": tokens}`; `completion`, or the
    assistant's text in a conversation, says how long the answer is to be. Entries without text of a user are left out.

    Args:
        path: the file.
        count: tokens of a text.
        output_len: `max_tokens` of all answers; None = as long as those of the file, 128 where it has none.
        multi_turn: all turns of an entry; else its first one.

    Raises:
        InvalidRequest: not such a file, or nothing usable in it; the message names the place.
        OSError: it cannot be read.
    """
    conversations = []
    for place, entry in _entries(path):
        conversation = _conversation(entry, place, count, output_len)
        if conversation is not None:
            turns = conversation.turns if multi_turn else conversation.turns[:1]
            conversations.append(Conversation(turns, conversation.system, conversation.system_len))
    if not conversations:
        raise InvalidRequest(f"{path} has no entry with a prompt of a user", "dataset")
    return conversations


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            values = [(f"{path}, entry {index}", value) for index, value in enumerate(json.loads(text))]
        else:
            lines = enumerate(text.splitlines(), 1)
            values = [(f"{path}, line {number}", json.loads(line)) for number, line in lines if line.strip()]
    except ValueError as error:
        raise InvalidRequest(f"{path} is neither a JSON list nor JSON lines: {error}", "dataset") from None
    for place, value in values:
        if not isinstance(value, dict):
            raise InvalidRequest(f"{place}: an entry is a JSON object, got {type(value).__name__}", "dataset")
        yield place, value


def _conversation(entry: dict[str, Any], place: str, count: CountTokens, output_len: int | None) -> Conversation | None:
    if "prompt" in entry:
        messages = [("user", entry["prompt"])]
        if "completion" in entry:
            messages.append(("assistant", entry["completion"]))
    else:
        said = entry.get("conversations", entry.get("messages"))
        if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
            raise InvalidRequest(
                f"{place}: an entry needs `conversations` or `messages` (a list of messages), or `prompt`; has "
                f"{', '.join(map(repr, entry)) or 'nothing'}",
                "dataset",
            )
        messages = [
            (_ROLES.get(str(m.get("from", m.get("role"))), "other"), m.get("value", m.get("content"))) for m in said
        ]
    wanted = entry.get("output_len", entry.get("max_tokens"))
    if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
        raise InvalidRequest(f"{place}: output_len must be an integer ≥ 1, got {wanted!r}", "dataset")
    if not all(isinstance(text, str) for _, text in messages):
        raise InvalidRequest(f"{place}: texts must be strings", "dataset")
    return _turns(messages, count, output_len or wanted)


def _turns(messages: Sequence[tuple[str, str]], count: CountTokens, output_len: int | None) -> Conversation | None:
    system = next((text for role, text in messages if role == "system"), "")
    turns = []
    for index, (role, text) in enumerate(messages):
        if role != "user" or not text:
            continue
        answer = (
            messages[index + 1][1] if messages[index + 1 : index + 2] and messages[index + 1][0] == "assistant" else ""
        )
        turns.append(Turn(text, count(text), output_len or (max(1, count(answer)) if answer else 128)))
    return Conversation(tuple(turns), system, count(system) if system else 0) if turns else None
