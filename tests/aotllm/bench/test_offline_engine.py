"""`OfflineEngine`: what it submits, how many at a time, and what it notes of each request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aotllm.bench.offline_engine import OfflineEngine
from aotllm.bench.offline_prompts import OfflinePrompt
from aotllm.errors import AotllmError, Overloaded
from aotllm.executor_config import ExecutorConfig
from aotllm.manager import ManagerRequest
from tests.aotllm.fake_manager import FakeEngine, FakeManager, FakeResponse


class SteppingManager(FakeManager):
    """Each poll is a step, and takes a second."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.now = 0.0
        self.most_running = 0
        self.interrupt_at: float | None = None

    def poll(self, timeout: float) -> list[FakeResponse]:
        self.most_running = max(self.most_running, len(self.running))
        self.now += 1.0
        if self.now == self.interrupt_at:
            raise KeyboardInterrupt
        return super().poll(timeout)


def endless(request: object) -> Iterator[int]:
    return itertools.cycle(b"x")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OfflineEngine]]:
    monkeypatch.setattr("aotllm.engines.open_engine", lambda path, verify=True: FakeEngine())
    opened: list[OfflineEngine] = []

    def make(manager: SteppingManager, **options: Any) -> OfflineEngine:
        factory = options | {"manager_factory": lambda *_: manager, "clock": lambda: manager.now}
        opened.append(OfflineEngine(Path("fake"), ExecutorConfig(), **factory))
        return opened[-1]

    yield make
    for made in opened:
        made.close()


def prompts(*lengths: int, output_len: int = 3) -> Sequence[OfflinePrompt]:
    return [OfflinePrompt(tuple(range(1, length + 1)), output_len) for length in lengths]


def test_all_at_once(engine: Callable[..., OfflineEngine]):
    manager = SteppingManager(endless, num_cached_tokens=1)
    run = engine(manager, seed=5, temperature=0.5).run(prompts(4, 2), salt="s")
    assert [request.prompt_token_ids for request in manager.submitted] == [(1, 2, 3, 4), (1, 2)]
    assert [request.sampling.seed for request in manager.submitted] == [5, 6]
    assert {(r.cache_salt, r.sampling.temperature, r.sampling.ignore_eos) for r in manager.submitted} == {
        ("s", 0.5, True)
    }
    assert (run.started, run.duration, run.interrupted) == (0.0, 3.0, False)
    for record, length in zip(run.records, (4, 2), strict=True):
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (length, 1, 3)
        assert (list(record.chunk_times), list(record.chunk_tokens)) == ([1, 2, 3], [1, 1, 1])
        assert (record.ttft, record.tpot, record.e2el, record.ok) == (1, 1, 3, True)


def test_several_tokens_of_a_step_are_one_chunk(engine: Callable[..., OfflineEngine]):
    manager = SteppingManager(endless, tokens_per_step=4)
    (record,) = engine(manager).run(prompts(1, output_len=10)).records
    assert (list(record.chunk_tokens), record.tpot) == ([4, 4, 2], pytest.approx(2 / 9))


def test_no_more_than_asked_for_run_at_a_time(engine: Callable[..., OfflineEngine]):
    manager = SteppingManager(endless)
    ended: list[float] = []
    run = engine(manager).run(prompts(*[1] * 5), concurrency=2, on_end=lambda: ended.append(manager.now))
    assert manager.most_running == 2
    assert [record.sent for record in run.records] == [0, 0, 3, 3, 6]
    assert ended == [3, 3, 6, 6, 9]


def test_a_queue_that_is_full_is_waited_for(engine: Callable[..., OfflineEngine]):
    manager = SteppingManager(endless, max_queue_size=2)
    run = engine(manager).run(prompts(*[1] * 5))
    assert [record.ok for record in run.records] == [True] * 5
    assert manager.most_running == 2


def test_a_queue_without_room_for_one_is_refused(engine: Callable[..., OfflineEngine]):
    with pytest.raises(Overloaded):
        engine(SteppingManager(endless, max_queue_size=0)).run(prompts(1))


def test_a_request_that_fails_ends_nothing_else(engine: Callable[..., OfflineEngine]):
    def answer(request: ManagerRequest) -> Iterator[int | AotllmError]:
        return iter([1, AotllmError("broken")] if len(request.prompt_token_ids) == 2 else [1, 2, 3])

    run = engine(SteppingManager(answer)).run(prompts(1, 2, 1))
    assert [record.ok for record in run.records] == [True, False, True]
    assert run.records[1].error is not None
    assert run.records[1].error.message == "broken"


def test_ctrl_c_keeps_what_has_ended(engine: Callable[..., OfflineEngine]):
    manager = SteppingManager(endless)
    manager.interrupt_at = 5.0
    loaded = engine(manager)
    run = loaded.run([*prompts(1), *prompts(1, output_len=100), *prompts(1)], concurrency=2)
    assert (run.interrupted, loaded.interrupted, run.cancelled) == (True, True, 2)
    assert [record.num_output_tokens for record in run.records] == [3]
    assert sorted(manager.cancelled) == [2, 3]
    assert manager.running == []
