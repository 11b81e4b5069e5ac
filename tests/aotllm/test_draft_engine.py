"""Speculative decoding with a draft engine: it is opened and compared before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotllm import Executor
from aotllm.errors import EngineError, EngineIncompatible
from tests.aotllm.byte_tokenizer import EOS
from tests.aotllm.fake_manager import FakeEngine, FakeManager, ManagerMaker, says


class OtherTokenizer:
    """The byte tokenizer, with one token changed or one token more."""

    def __init__(self, changed: int | None = None, more: int = 0) -> None:
        self._base = FakeEngine().tokenizer()
        self._changed = changed
        self.vocab_size = self._base.vocab_size + more

    def token_bytes(self, token_id: int) -> bytes:
        return b"?!" if token_id == self._changed else self._base.token_bytes(token_id)


def draft(tokenizer: Any = None, eos: tuple[int, ...] = (EOS,)) -> Any:
    engine: Any = FakeEngine(path="small.engine")
    engine.manifest = SimpleNamespace(eos_token_ids=eos)
    if tokenizer is not None:
        engine.tokenizer = lambda: tokenizer
    return engine


def load(monkeypatch: pytest.MonkeyPatch, engine: Any, maker: ManagerMaker) -> None:
    calls: list[tuple[Any, bool]] = []

    def open_engine(path: Any, verify: bool = True) -> Any:
        calls.append((path, verify))
        return engine

    monkeypatch.setattr("aotllm.engines.open_engine", open_engine)
    with Executor(FakeEngine(), speculative="small.engine", verify=False, manager_factory=maker):
        pass
    assert calls == [("small.engine", False)]


def test_the_draft_engine_reaches_the_manager(monkeypatch: pytest.MonkeyPatch):
    maker = ManagerMaker(FakeManager(says("ok")))
    load(monkeypatch, draft(), maker)
    assert maker.draft_rank_file == Path("small.engine/rank0.engine")
    assert maker.config.speculation == "draft"


def test_without_one_there_is_none():
    maker = ManagerMaker(FakeManager(says("ok")))
    with Executor(FakeEngine(), speculative="ngram", manager_factory=maker):
        assert (maker.draft_rank_file, maker.config.speculation) == (None, "ngram")


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        (draft(OtherTokenizer(more=1)), "its tokenizer has 261 tokens, the target's 260"),
        (draft(OtherTokenizer(changed=66)), r"its token 66 is b'\?!', the target's b'B'"),
        (draft(eos=(EOS, 7)), r"its end tokens are \[7, 257\], the target's \[257\]"),
    ],
)
def test_other_tokens_are_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, engine: Any, what: str):
    maker = ManagerMaker(FakeManager(says("ok")))
    with pytest.raises(EngineIncompatible, match=rf"small.engine: cannot draft for fake.engine: {what}"):
        load(monkeypatch, engine, maker)
    assert not hasattr(maker, "config")


def test_a_folder_that_is_no_engine(tmp_path: Path):
    with pytest.raises(EngineError):
        Executor(FakeEngine(), speculative=str(tmp_path / "none"), manager_factory=lambda *_: FakeManager())
