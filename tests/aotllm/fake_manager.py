"""A manager without kernels, and an engine without weights: what `Executor` needs, in plain Python."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from aotllm.errors import AotllmError, Cancelled, Overloaded
from aotllm.manager import ExecutorConfig, ManagerRequest
from aotllm.tokenization import Tokenizer
from tests.aotllm.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

Answer = Callable[[ManagerRequest], Iterable["int | AotllmError"]]


@dataclass
class FakeLogprob:
    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class FakeResponse:
    request_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[FakeLogprob] = field(default_factory=list)
    logits: list[object] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error_kind: str | None = None
    error_message: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass
class _Running:
    request: ManagerRequest
    tokens: Iterator[int | AotllmError]
    count: int = 0


class FakeManager:
    """Steps like the real loop: each step gives every running request the next token of its scripted answer.

    Args:
        answer: request -> its tokens. After the last one comes the end token; an `AotllmError` among them fails the
            request.
        stepping: "free": a step whenever somebody polls. "by hand": only `step()`.
        tokens_per_step: more than one, as with speculative decoding.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        stepping: str = "free",
        max_seq_len: int = 4096,
        max_queue_size: int = 1024,
        tokens_per_step: int = 1,
        num_cached_tokens: int = 0,
    ) -> None:
        self.submitted: list[ManagerRequest] = []
        self.cancelled: list[int] = []
        self.shutdowns: list[bool] = []
        self.max_seq_len = max_seq_len
        self.max_queue_size = max_queue_size
        self.vocab_size = VOCAB_SIZE
        self.changed = threading.Condition()
        self._answer = answer
        self._free = stepping == "free"
        self._tokens_per_step = tokens_per_step
        self._num_cached_tokens = num_cached_tokens
        self._running: dict[int, _Running] = {}
        self._ready: deque[FakeResponse] = deque()
        self._closed = False
        self._fault: Exception | None = None

    def submit(self, request: ManagerRequest) -> int:
        with self.changed:
            if self._closed:
                raise Cancelled("shut down")
            if len(self._running) >= self.max_queue_size:
                raise Overloaded(f"the queue is full ({self.max_queue_size} requests)", retry_after=2.5)
            self.submitted.append(request)
            request_id = len(self.submitted)
            self._running[request_id] = _Running(request, iter(self._answer(request)))
            self.changed.notify_all()
            return request_id

    def cancel(self, request_id: int) -> None:
        with self.changed:
            self.cancelled.append(request_id)
            if self._running.pop(request_id, None) is not None:
                self._ready.append(FakeResponse(request_id, finish_reason="cancelled"))
            self.changed.notify_all()

    def poll(self, timeout: float) -> list[FakeResponse]:
        with self.changed:
            self.changed.wait_for(
                lambda: self._ready or self._fault or (self._free and self._running) or self._nothing_left(), timeout
            )
            if self._fault is not None:
                raise self._fault
            if not self._ready and self._free:
                self._step()
            ready = list(self._ready)
            self._ready.clear()
            self.changed.notify_all()
            return ready

    def stats(self) -> SimpleNamespace:
        with self.changed:
            return SimpleNamespace(running=len(self._running))

    def shutdown(self, drain: bool = False) -> None:
        with self.changed:
            self.shutdowns.append(drain)
            self._closed = True
            if not drain:
                self._ready += [FakeResponse(request_id, finish_reason="cancelled") for request_id in self._running]
                self._running.clear()
            self.changed.notify_all()

    # For tests -------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        with self.changed:
            return list(self._running)

    def step(self, count: int = 1) -> None:
        """One token for every running request."""
        with self.changed:
            for _ in range(count):
                self._step()
            self.changed.notify_all()

    def push(self, response: FakeResponse) -> None:
        """Any response at all."""
        with self.changed:
            self._ready.append(response)
            self.changed.notify_all()

    def fail(self, fault: Exception) -> None:
        """Let the next poll raise."""
        with self.changed:
            self._fault = fault
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[FakeManager], bool]) -> None:
        """Wait for a call from another thread; fails after a minute, so that a broken test does not hang."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), timeout=60)

    def _nothing_left(self) -> bool:
        return self._closed and not self._running

    def _step(self) -> None:
        for request_id, running in list(self._running.items()):
            response = self._respond(request_id, running)
            self._ready.append(response)
            if response.finish_reason is not None or response.error_kind is not None:
                del self._running[request_id]

    def _respond(self, request_id: int, running: _Running) -> FakeResponse:
        sampling = running.request.sampling
        response = FakeResponse(
            request_id,
            num_prompt_tokens=len(running.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
        )
        while len(response.token_ids) < self._tokens_per_step and response.finish_reason is None:
            token = next(running.tokens, EOS)
            if isinstance(token, AotllmError):
                response.error_kind, response.error_message = token.kind, token.message
                return response
            running.count += 1
            response.token_ids.append(token)
            if sampling.logprobs is not None:
                top = [(token, -0.5), (0, float("-inf"))][: sampling.logprobs]
                response.logprobs.append(FakeLogprob(token, -0.5, top))
            if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
                response.finish_reason, response.stop_token_id = "stop", token
            elif running.count == sampling.max_tokens:
                response.finish_reason = "length"
        return response


class FakeEngine:
    """What `Executor` reads of an opened engine."""

    def __init__(self, generation_config: dict[str, object] | None = None, chat: bool = True) -> None:
        self.path = Path("fake.engine")
        self.generation_config = generation_config or {}
        self.manifest = SimpleNamespace(eos_token_ids=(EOS,), model=SimpleNamespace(name="Fake-1M"))
        self._chat = chat

    def rank_file(self, rank: int) -> Path:
        return self.path / f"rank{rank}.engine"

    def tokenizer(self) -> Tokenizer:
        return byte_tokenizer(self._chat)


def says(text: str | bytes) -> Answer:
    """Every request gets this text, one byte per token."""
    data = text.encode() if isinstance(text, str) else text
    return lambda request: data


def echoes(request: ManagerRequest) -> Sequence[int]:
    """The answer is the prompt."""
    return request.prompt_token_ids


class ManagerMaker:
    """A manager factory that hands out one given manager and keeps what it was called with."""

    def __init__(self, manager: FakeManager) -> None:
        self._manager = manager

    def __call__(self, rank_file: Path, config: ExecutorConfig, eos_token_ids: Sequence[int]) -> FakeManager:
        self.rank_file, self.config, self.eos_token_ids = rank_file, config, eos_token_ids
        self._manager.max_queue_size = min(self._manager.max_queue_size, config.max_queue_size)
        return self._manager
