"""`LoadRunner`: puts conversations to a backend in a load shape."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from aotllm.bench.arrivals import Arrivals
from aotllm.bench.backends.base import Backend, RequestSettings
from aotllm.bench.conversation import Conversation, History
from aotllm.bench.record import RequestFailed, RequestRecord


class Conversations(Protocol):
    """Any number of conversations, each found by its index."""

    def __getitem__(self, index: int) -> Conversation:
        """The same one each time."""


@dataclass(frozen=True)
class LoadShape:
    """How many requests, and when."""

    num_prompts: int | None = None
    """Requests (each turn is one); None = no limit"""
    duration: float | None = None
    """Seconds after which no more requests are sent; those under way end in their own time. None = no limit"""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """When conversations begin"""
    concurrency: int | None = None
    """Most requests at a time; None = no limit"""
    think_time: float = 0.0
    """Seconds between an answer and the next turn"""
    timeout: float | None = None
    """Seconds until a request is given up"""
    seed: int = 0
    first_conversation: int = 0
    """Index of the first one that is asked"""

    def progress(self, index: int, due: float) -> float:
        """Share of the run that is over, by the number of arrivals or by time."""
        if self.num_prompts is not None:
            return index / max(1, self.num_prompts - 1)
        return due / self.duration if self.duration else 0.0


@dataclass
class LoadRun:
    """What a runner has seen."""

    started: float
    duration: float = 0.0
    """Seconds from the start to the end of the last request"""
    records: list[RequestRecord] = field(default_factory=list)
    """Of requests that have ended, in the order in which they were sent"""
    cancelled: int = 0
    """Requests that the end of an interrupted run has cut off"""
    skipped: int = 0
    """Turns that were not asked because the one before had failed"""
    conversations: int = 0
    """Conversations that have begun"""
    interrupted: bool = False


class LoadRunner:
    """One run. A request that fails ends its conversation and nothing else.

    Args:
        backend, settings: whom to ask, and how.
        conversations: what to ask.
        load: how many, and when.
        keep_texts: let the records keep the answers.
        on_end: called with each record when its request has ended.
        clock: seconds; that of the backend.
    """

    def __init__(
        self,
        backend: Backend,
        settings: RequestSettings,
        conversations: Conversations,
        load: LoadShape,
        *,
        keep_texts: bool = True,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend, self._settings, self._conversations, self._load = backend, settings, conversations, load
        self._keep_texts, self._on_end, self._clock = keep_texts, on_end, clock
        self._slots = asyncio.Semaphore(load.concurrency or 1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None

    async def run(self) -> LoadRun:
        """Returns when all requests have ended, or at once after `stop`."""
        self._run = LoadRun(self._clock())
        self._producer = asyncio.ensure_future(self._begin_conversations())
        try:
            await asyncio.wait({self._producer})
            while self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.wait({self._producer, *self._tasks})
            raise
        run = self._run
        if self._fault is None and not self._producer.cancelled():
            self._fault = self._producer.exception()
        if self._fault is not None:
            raise self._fault
        ends = [record.ended for record in run.records if record.ended is not None]
        run.duration = (self._clock() if run.interrupted else max(ends, default=run.started)) - run.started
        run.cancelled = sum(record.ended is None for record in run.records)
        run.records = [record for record in run.records if record.ended is not None]
        return run

    def stop(self) -> None:
        """End the run now; what has ended so far is its result."""
        self._run.interrupted = True
        self._producer.cancel()
        for task in self._tasks:
            task.cancel()

    async def _begin_conversations(self) -> None:
        load, run = self._load, self._run
        left = math.inf if load.num_prompts is None else load.num_prompts
        index = load.first_conversation
        for offset in load.arrivals.due_times(load.seed, load.progress):
            if left <= 0 or (load.duration is not None and offset >= load.duration):
                return
            due = run.started + offset
            if (wait := due - self._clock()) > 0:
                await asyncio.sleep(wait)
            if load.concurrency is not None:
                await self._slots.acquire()
                due = max(due, self._clock())  # to wait for a slot is no lag of the client
            if self._over():
                return
            conversation = self._conversations[index]
            turns = conversation.turns[: int(min(left, len(conversation.turns)))]
            left -= len(turns)
            index += 1
            run.conversations += 1
            task = asyncio.ensure_future(
                self._converse(Conversation(turns, conversation.system, conversation.system_len), due)
            )
            self._tasks.add(task)
            task.add_done_callback(self._converse_ended)

    def _converse_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._load.concurrency is not None:
            self._slots.release()
        if not task.cancelled() and (fault := task.exception()) is not None and self._fault is None:
            self._fault = fault  # of ours, or of the backend's code: requests that fail do not raise
            self.stop()

    async def _converse(self, conversation: Conversation, due: float) -> None:
        load = self._load
        history = History(conversation)
        for number, turn in enumerate(conversation.turns):
            if number:
                if load.think_time:
                    await asyncio.sleep(load.think_time)
                if self._over():
                    return
                due = self._clock()
            history.ask(turn)
            record = RequestRecord(history.num_tokens, turn.output_len, due)
            await self._request(history, record)
            if record.error is not None:
                self._run.skipped += len(conversation.turns) - number - 1
                return
            history.answer(record.text, record.num_output_tokens)
            if not self._keep_texts:
                record.texts = []

    async def _request(self, history: History, record: RequestRecord) -> None:
        self._run.records.append(record)
        record.sent = self._clock()
        asking = self._backend.generate(history.messages, record.wanted_output, self._settings, record)
        try:
            await (asking if self._load.timeout is None else asyncio.wait_for(asking, self._load.timeout))
        except asyncio.TimeoutError:
            record.error = RequestFailed("timeout", f"no complete answer within {self._load.timeout:g} s")
        except RequestFailed as error:
            record.error = error
        record.ended = self._clock()
        self._on_end(record)

    def _over(self) -> bool:
        duration = self._load.duration
        return duration is not None and self._clock() - self._run.started >= duration
