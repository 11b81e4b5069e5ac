"""A manager without kernels, and an engine without weights: what `Executor` needs, in plain Python."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from aotllm.errors import AotllmError, Cancelled, Overloaded
from aotllm.executor_config import ExecutorConfig
from aotllm.manager import ALL_SEQUENCES, ManagerRequest
from aotllm.tokenization import Tokenizer
from tests.aotllm.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

Answer = Callable[[ManagerRequest], Iterable["int | AotllmError"]]
NthAnswer = Callable[[ManagerRequest, int], Iterable["int | AotllmError"]]
Top = Callable[[Sequence[int]], "list[tuple[int, float]]"]


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
    sequence_index: int = 0
    prompt_logprobs: list[FakeLogprob] = field(default_factory=list)
    timings: SimpleNamespace | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    embedding: object = None


@dataclass
class _Running:
    """One sequence of a request."""

    request: ManagerRequest
    tokens: Iterator[int | AotllmError]
    output: list[int] = field(default_factory=list)


class FakeManager:
    """Steps like the real loop: each step gives every running request the next token of its scripted answer.

    Args:
        answer: request -> its tokens. After the last one comes the end token; an `AotllmError` among them fails the
            request. All n sequences of a request get the same, unless there is a `nth_answer`.
        nth_answer: request, sequence index -> its tokens.
        top: text so far (prompt and answer) -> the most likely next tokens with their log-probabilities, most likely
            first; None = the scripted token has log-probability -0.5, token 0 minus infinity.
        stepping: "free": a step whenever somebody polls. "by hand": only `step()`.
        tokens_per_step: more than one, as with speculative decoding.
    """

    def __init__(
        self,
        answer: Answer = lambda _: b"ok",
        *,
        nth_answer: NthAnswer | None = None,
        top: Top | None = None,
        stepping: str = "free",
        max_seq_len: int = 4096,
        max_queue_size: int = 1024,
        tokens_per_step: int = 1,
        num_cached_tokens: int = 0,
    ) -> None:
        self.submitted: list[ManagerRequest] = []
        self.cancelled: list[int] = []
        """Request ids, of those that were cancelled as a whole or had one sequence only"""
        self.cancelled_sequences: list[tuple[int, int]] = []
        """(request id, sequence index), of the other ones"""
        self.adapters: dict[int, object] = {}
        self.shutdowns: list[bool] = []
        self.max_seq_len = max_seq_len
        self.max_queue_size = max_queue_size
        self.vocab_size = VOCAB_SIZE
        self.changed = threading.Condition()
        self._answer = nth_answer or (lambda request, _: answer(request))
        self._top = top
        self._free = stepping == "free"
        self._tokens_per_step = tokens_per_step
        self._num_cached_tokens = num_cached_tokens
        self._running: dict[tuple[int, int], _Running] = {}
        self._ready: deque[FakeResponse] = deque()
        self._closed = False
        self._polling = False  # what the last poll returned has been handed on
        self._fault: Exception | None = None

    def submit(self, request: ManagerRequest) -> int:
        with self.changed:
            if self._closed:
                raise Cancelled("shut down")
            if len(self.running) >= self.max_queue_size:
                raise Overloaded(f"the queue is full ({self.max_queue_size} requests)", retry_after=2.5)
            self.submitted.append(request)
            request_id = len(self.submitted)
            for index in range(request.n):
                self._running[request_id, index] = _Running(request, iter(self._answer(request, index)))
            self.changed.notify_all()
            return request_id

    def cancel(self, request_id: int, sequence_index: int = ALL_SEQUENCES) -> None:
        with self.changed:
            if sequence_index == ALL_SEQUENCES or self.submitted[request_id - 1].n == 1:
                self.cancelled.append(request_id)
            else:
                self.cancelled_sequences.append((request_id, sequence_index))
            self._end("cancelled", request_id, sequence_index)

    def poll(self, timeout: float) -> list[FakeResponse]:
        with self.changed:
            self._polling = True
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: self._ready or self._fault or (self._free and self._running) or self._nothing_left(), timeout
            )
            self._polling = False
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
            return SimpleNamespace(running=len(self._running), steps=3, blocks_used=1, blocks_total=4, spilled=5)

    def memory(self) -> SimpleNamespace:
        group = SimpleNamespace(window=0, bytes_per_block=8192, device_blocks=40, host_blocks=0)
        return SimpleNamespace(
            groups=[group],
            tokens_per_block=16,
            max_seq_len=self.max_seq_len,
            device_bytes=40 * 8192,
            host_bytes=0,
            tokens=640,
            sequences_at_max_len=10,
        )

    def kv_events(self) -> list[object]:
        return []

    def load_adapter(self, adapter_id: int, adapter: object) -> None:
        self.adapters[adapter_id] = adapter

    def unload_adapter(self, adapter_id: int) -> None:
        del self.adapters[adapter_id]

    def shutdown(self, drain: bool = False) -> None:
        with self.changed:
            self.shutdowns.append(drain)
            self._closed = True
            if not drain:
                self._end("cancelled")
            self.changed.notify_all()

    # For tests -------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        with self.changed:
            return sorted({request_id for request_id, _ in self._running})

    def time_out(self, request_id: int) -> None:
        """As when a request's time is over."""
        self._end("timeout", request_id)

    def step(self, count: int = 1) -> None:
        """One token for every running request."""
        with self.changed:
            for _ in range(count):
                self._step()
            self.changed.notify_all()

    def step_and_wait(self) -> None:
        """One token for every running request, if there is any, which the executor has handed on when this returns."""
        with self.changed:
            if self._running:
                self.step()
            self.changed.wait_for(lambda: self._polling and not self._ready, timeout=60)

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
        for (request_id, index), running in list(self._running.items()):
            if (request_id, index) not in self._running:
                continue  # failed with another sequence of its request
            response = self._respond(request_id, index, running)
            self._ready.append(response)
            if response.error_kind is not None:
                for key in [key for key in self._running if key[0] == request_id]:
                    del self._running[key]
            elif response.finish_reason is not None:
                self._running.pop((request_id, index), None)

    def _end(self, reason: str, request_id: int | None = None, sequence_index: int = ALL_SEQUENCES) -> None:
        with self.changed:
            for key in list(self._running):
                if request_id in (None, key[0]) and sequence_index in (ALL_SEQUENCES, key[1]):
                    del self._running[key]
                    self._ready.append(FakeResponse(key[0], sequence_index=key[1], finish_reason=reason))
            self.changed.notify_all()

    def _respond(self, request_id: int, index: int, running: _Running) -> FakeResponse:
        sampling = running.request.sampling
        response = FakeResponse(
            request_id,
            num_prompt_tokens=len(running.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            sequence_index=index,
        )
        if running.request.pooling is not None:
            response.embedding = fake_embedding(running.request)
            response.finish_reason = "stop"
            response.timings = SimpleNamespace(queue_seconds=0.0, first_token_seconds=0.0, total_seconds=0.2)
            return response
        if running.request.prompt_logprobs is not None and index == 0 and not running.output:
            tokens = running.request.prompt_token_ids[1:]
            response.prompt_logprobs = [self._logprobs(t, [], running.request.prompt_logprobs) for t in tokens]
        while len(response.token_ids) < self._tokens_per_step and response.finish_reason is None:
            token = next(running.tokens, EOS)
            if isinstance(token, AotllmError):
                response.error_kind, response.error_message = token.kind, token.message
                return response
            text = [*running.request.prompt_token_ids, *running.output]
            running.output.append(token)
            response.token_ids.append(token)
            if running.request.logprobs is not None:
                response.logprobs.append(self._logprobs(token, text, running.request.logprobs))
            if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
                response.finish_reason, response.stop_token_id = "stop", token
            elif len(running.output) == sampling.max_tokens:
                response.finish_reason = "length"
        if response.finish_reason is not None:
            response.timings = SimpleNamespace(queue_seconds=0.0, first_token_seconds=0.1, total_seconds=0.2)
            response.num_preemptions, response.num_draft_tokens, response.num_accepted_tokens = 1, 4, 3
        return response

    def _logprobs(self, token: int, text: Sequence[int], count: int) -> FakeLogprob:
        top = [(token, -0.5), (0, float("-inf"))] if self._top is None else self._top(text)
        return FakeLogprob(token, dict(top).get(token, float("-inf")), top[:count])


def fake_embedding(request: ManagerRequest) -> np.ndarray:
    """The fake model's hidden state of a token is [token, its square, adapter, 1]."""
    hidden = np.array([[t, t * t, request.adapter, 1] for t in request.prompt_token_ids], np.float32)
    return hidden[-1] if request.pooling == "last" else hidden.mean(0, dtype=np.float64).astype(np.float32)


class FakeEngine:
    """What `Executor` reads of an opened engine."""

    def __init__(
        self, generation_config: dict[str, object] | None = None, chat: bool = True, path: str = "fake.engine"
    ) -> None:
        self.path = Path(path)
        self.generation_config = generation_config or {}
        self.manifest = SimpleNamespace(
            eos_token_ids=(EOS,),
            model=SimpleNamespace(name="Fake-1M"),
            target=SimpleNamespace(name="cpu"),
            limits=SimpleNamespace(max_batch_size=8),
        )
        self.verification = None
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

    def __call__(
        self, rank_file: Path, config: ExecutorConfig, eos_token_ids: Sequence[int], draft_rank_file: Path | None
    ) -> FakeManager:
        self.rank_file, self.config, self.eos_token_ids = rank_file, config, eos_token_ids
        self.draft_rank_file = draft_rank_file
        self._manager.max_queue_size = min(self._manager.max_queue_size, config.max_queue_size)
        return self._manager
