"""`OfflineEngine`: an engine in this process that is given requests as token ids, and what is seen of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from aotllm.bench.load import LoadRun
from aotllm.bench.offline_prompts import OfflinePrompt
from aotllm.bench.record import RequestFailed, RequestRecord
from aotllm.errors import Overloaded
from aotllm.executor_config import ExecutorConfig
from aotllm.loaded_engine import LoadedEngine
from aotllm.manager import ManagerFactory, ManagerRequest, Response
from aotllm.sampling_params import SamplingParams

_POLL_SECONDS = 1.0


class OfflineEngine:
    """The in-flight-batching loop without text: neither detokenizer nor event loop take time from the kernels.

    Args:
        engine: folder of the engine.
        config: sizes and policies.
        verify: compare the digests of the engine's files first.
        temperature, ignore_eos, seed: of all requests; the draws of request i are seeded with seed + i.
        manager_factory: makes the loop; None = the compiled one.
        clock: seconds.

    Raises:
        EngineError: the engine is missing or damaged.
        EngineIncompatible: it was built for another machine or version.
        InvalidRequest: an option is out of range.
    """

    def __init__(
        self,
        engine: Path,
        config: ExecutorConfig,
        *,
        verify: bool = True,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        seed: int = 0,
        manager_factory: ManagerFactory | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        begin = clock()
        loaded = LoadedEngine(engine, config, verify, manager_factory)
        self.load_seconds = clock() - begin
        self.manager, self.tokenizer, self.manifest = loaded.manager, loaded.tokenizer, loaded.engine.manifest
        self._temperature, self._ignore_eos, self._seed = temperature, ignore_eos, seed
        self._interrupted = False

    @property
    def interrupted(self) -> bool:
        """By Ctrl-C: the latest run was cut short, and no further one is of use."""
        return self._interrupted

    def run(
        self,
        prompts: Sequence[OfflinePrompt],
        *,
        concurrency: int | None = None,
        salt: str = "",
        on_end: Callable[[], None] = lambda: None,
    ) -> LoadRun:
        """All requests to their end; one that fails ends nothing else.

        Args:
            prompts: in the order in which they are submitted.
            concurrency: most requests at a time, the next one when another has ended; None = all.
            salt: prefixes are found in the cache by requests of an equal one only.
            on_end: called when a request has ended.

        Returns:
            Records in the order of submission. After Ctrl-C, those that had ended.
        """
        run = LoadRun(self._clock())
        waiting, running = deque(prompts), dict[int, RequestRecord]()
        try:
            while waiting or running:
                while waiting and (concurrency is None or len(running) < concurrency):
                    if not self._submit(waiting[0], len(run.records), salt, run, running):
                        break  # the queue is full: some have to end first
                    waiting.popleft()
                self._take(running, on_end)
        except KeyboardInterrupt:
            self._interrupted = run.interrupted = True
            self._drain(running)
        ends = [record.ended for record in run.records if record.ended is not None]
        run.cancelled = len(run.records) - len(ends)
        run.records = [record for record in run.records if record.ended is not None]
        run.duration = max(ends, default=run.started) - run.started
        run.conversations = len(run.records)
        return run

    def close(self) -> None:
        """End the loop."""
        self.manager.shutdown()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _submit(
        self, prompt: OfflinePrompt, number: int, salt: str, run: LoadRun, running: dict[int, RequestRecord]
    ) -> bool:
        """False where the queue is full of requests of this run."""
        sampling = SamplingParams(
            max_tokens=prompt.output_len,
            temperature=self._temperature,
            ignore_eos=self._ignore_eos,
            seed=self._seed + number,
        )
        now = self._clock()
        record = RequestRecord(len(prompt.token_ids), prompt.output_len, due=now, sent=now)
        try:
            request_id = self.manager.submit(ManagerRequest(prompt.token_ids, sampling, cache_salt=salt))
        except Overloaded:
            if not running:
                raise
            return False
        run.records.append(record)
        running[request_id] = record
        return True

    def _take(self, running: dict[int, RequestRecord], on_end: Callable[[], None]) -> None:
        responses = self.manager.poll(_POLL_SECONDS)
        now = self._clock()
        for response in responses:
            record = running.get(response.request_id)
            if record is not None and _note(record, response, now):
                del running[response.request_id]
                on_end()

    def _drain(self, running: dict[int, RequestRecord]) -> None:
        for request_id in running:
            self.manager.cancel(request_id)
        left = set(running)
        while left:
            for response in self.manager.poll(_POLL_SECONDS):
                if response.finish_reason is not None or response.error_kind is not None:
                    left.discard(response.request_id)


def _note(record: RequestRecord, response: Response, now: float) -> bool:
    """Add a response to its record; whether it is the last one."""
    if response.error_kind is not None:
        record.error = RequestFailed(response.error_kind, response.error_message or response.error_kind)
        record.ended = now
        return True
    if response.token_ids:
        record.chunk(now, "", total_tokens=record.num_output_tokens + len(response.token_ids))
    record.usage(response.num_prompt_tokens, None, max(response.num_cached_tokens, record.cached_tokens or 0))
    if response.finish_reason is None:
        return False
    if response.finish_reason == "timeout":
        record.error = RequestFailed("timeout", "the time was over before the answer was; --timeout sets it")
    record.finished = record.ended = now
    return True
