"""Files of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotllm.bench.conversation import Conversation, Turn
from aotllm.bench.dataset import DatasetConversations, read_dataset
from aotllm.errors import InvalidRequest


def read(path: Path, content: Any, **options: Any) -> list[Conversation]:
    path = path / "data"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    options = {"count": lambda text: len(text.split()), "output_len": None, "multi_turn": False} | options
    return read_dataset(path, **options)


SHAREGPT = {
    "id": "x",
    "conversations": [
        {"from": "system", "value": "be good"},
        {"from": "human", "value": "how are you"},
        {"from": "gpt", "value": "well"},
        {"from": "human", "value": "really"},
        {"from": "gpt", "value": "yes I am"},
    ],
}


def test_sharegpt(tmp_path: Path):
    first = Turn("how are you", 3, 1)
    assert read(tmp_path, [SHAREGPT]) == [Conversation((first,), "be good", 2)]
    assert read(tmp_path, [SHAREGPT], multi_turn=True) == [Conversation((first, Turn("really", 1, 3)), "be good", 2)]
    assert read(tmp_path, [SHAREGPT], output_len=9)[0].turns == (Turn("how are you", 3, 9),)


@pytest.mark.parametrize(
    ("entry", "turn"),
    [
        ({"prompt": "a b"}, Turn("a b", 2, 128)),
        ({"prompt": "a b", "output_len": 5}, Turn("a b", 2, 5)),
        ({"prompt": "a b", "max_tokens": 6, "other": 1}, Turn("a b", 2, 6)),
        ({"prompt": "a b", "completion": "c d e"}, Turn("a b", 2, 3)),
        ({"messages": [{"role": "user", "content": "a b"}]}, Turn("a b", 2, 128)),
        ({"messages": [{"role": "tool", "content": "t"}, {"role": "user", "content": "a"}]}, Turn("a", 1, 128)),
    ],
    ids=str,
)
def test_lines_of_all_kinds(tmp_path: Path, entry: dict[str, Any], turn: Turn):
    assert read(tmp_path, f"{json.dumps(entry)}\n\n") == [Conversation((turn,))]
    assert read(tmp_path, [entry]) == [Conversation((turn,))]


def test_entries_without_a_user_are_left_out(tmp_path: Path):
    silent = {"conversations": [{"from": "gpt", "value": "hello"}]}
    assert len(read(tmp_path, [silent, SHAREGPT, {"prompt": ""}])) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no entry with a prompt"),
        ([], "no entry with a prompt"),
        ("{", "neither a JSON list nor JSON lines"),
        ("[1", "neither a JSON list nor JSON lines"),
        ([SHAREGPT, 1], "entry 1: an entry is a JSON object, got int"),
        ('{"prompt": "a"}\n[]', "line 2: an entry is a JSON object, got list"),
        ([{"text": "a"}], "entry 0: an entry needs `conversations` or `messages`"),
        ([{"messages": "a"}], "entry 0: an entry needs"),
        ([{"prompt": 5}], "entry 0: texts must be strings"),
        ([{"messages": [{"role": "user", "content": None}]}], "entry 0: texts must be strings"),
        ([{"prompt": "a", "output_len": 0}], "entry 0: output_len must be an integer ≥ 1, got 0"),
    ],
    ids=str,
)
def test_bad_files_are_one_sentence_with_the_place(tmp_path: Path, content: Any, message: str):
    with pytest.raises(InvalidRequest, match=message):
        read(tmp_path, content)


def test_the_order_is_the_seeds_and_starts_again():
    conversations = [Conversation((Turn(str(i), 1, 1),)) for i in range(20)]
    data = DatasetConversations(conversations, seed=1)
    order = [data[i] for i in range(20)]
    assert sorted(order, key=lambda c: int(c.turns[0].text)) == conversations
    assert order != conversations
    assert [data[i + 20] for i in range(20)] == order
    assert [DatasetConversations(conversations, seed=2)[i] for i in range(20)] != order
