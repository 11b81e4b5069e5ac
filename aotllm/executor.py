"""`Executor`: runs one engine for many requests at a time."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from aotllm.beam_search import BeamSearchParams
from aotllm.beam_search_driver import BeamSearchDriver
from aotllm.dispatcher import Dispatcher
from aotllm.embedding import EmbeddingOutput
from aotllm.errors import EngineError, InvalidRequest
from aotllm.executor_config import ExecutorConfig
from aotllm.kv_memory import KvMemory
from aotllm.loaded_engine import LoadedEngine
from aotllm.manager import ManagerFactory
from aotllm.request import Pooling, Promptlike, Request, RequestOutput, as_request
from aotllm.request_batch import RequestBatch
from aotllm.request_handle import RequestHandle, RequestListener
from aotllm.request_preparer import Prepared, RequestPreparer
from aotllm.sampling_params import SamplingParams
from aotllm.stats import ExecutorStats

if TYPE_CHECKING:
    from aotllm.engines import Engine

T = TypeVar("T")


class Executor:
    """Loads an engine and runs requests on it with in-flight batching.

        with Executor("smollm2-135m") as executor:
            for output in executor.submit(Request(prompt="Once upon a time")):
                print(output.text, end="")

    All methods may be called from any thread; `submit_async`, `generate_async`, and handles that are awaited serve any
    number of event loops. An executor ends with its context, with `shutdown()`, when it and its handles are garbage
    collected, and at interpreter exit; requests in flight then end as cancelled.

    Args:
        engine: folder of an engine bundle, or an opened one.
        config: sizes and policies; None = the defaults.
        options: fields of `ExecutorConfig` that differ from `config`: `Executor(engine, num_threads=2)`.
        verify: compare the digests of the bundle's files, half a second per GB, unless these very files were found to
            be right before; else only their sizes.
        manager_factory: makes the in-flight-batching loop; None = the compiled one. For tests.

    Raises:
        EngineError: the bundle, or that of the draft engine, is missing or damaged.
        EngineIncompatible: it was built for another machine or version, or cannot draft for the other.
        InvalidRequest: an option is out of range.
    """

    def __init__(
        self,
        engine: str | Path | Engine,
        config: ExecutorConfig | None = None,
        *,
        verify: bool = True,
        manager_factory: ManagerFactory | None = None,
        **options: Any,
    ) -> None:
        self.config = dataclasses.replace(config or ExecutorConfig(), **options)
        loaded = LoadedEngine(engine, self.config, verify, manager_factory)
        self.engine, self.tokenizer = loaded.engine, loaded.tokenizer
        self.default_sampling = engine_sampling(self.engine)
        """Sampling of requests that bring none: the checkpoint's generation_config.json"""
        self._manager, self._adapters = loaded.manager, loaded.adapters
        self._preparer = RequestPreparer(
            self.tokenizer,
            self.default_sampling,
            self.config.timeout,
            self._manager,
            self._adapters.id_of,
            loaded.grammars.compile,
        )
        self._dispatcher = Dispatcher(self._manager)
        # Also runs at interpreter exit, when the (daemon) dispatcher thread still lives.
        self._finalizer = weakref.finalize(self, self._dispatcher.shutdown)

    @property
    def max_seq_len(self) -> int:
        """Most tokens of a request, prompt and answer together."""
        return self._manager.max_seq_len

    @property
    def alive(self) -> bool:
        """Takes requests. False after shutdown, and after a fault of the runtime itself."""
        return self._dispatcher.alive

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self._dispatcher.in_flight

    def stats(self) -> ExecutorStats:
        """Counters of the runtime."""
        return ExecutorStats.from_native(self._manager.stats())

    def memory(self) -> KvMemory:
        """What the KV memory buys."""
        return KvMemory.from_native(self._manager.memory())

    async def stats_async(self) -> ExecutorStats:
        """`stats` for event loops."""
        return self.stats()

    async def memory_async(self) -> KvMemory:
        """`memory` for event loops."""
        return self.memory()

    def kv_events(self) -> Sequence[Any]:
        """News of the prefix cache since the last call, as in `_runtime.KvEvent`. See `ExecutorConfig.max_kv_events`;
        events that nobody reads in time are dropped, which a gap in their ids tells."""
        return self._manager.kv_events()

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters, for `Request.adapter`."""
        return self._adapters.names

    def load_lora(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter (a PEFT folder) that requests can use by its name; others go on meanwhile.

        Raises:
            InvalidRequest: the name is empty or taken, or the adapter does not fit the model.
            CheckpointError: the folder is damaged.
        """
        self._adapters.load(name, Path(folder))

    def unload_lora(self, name: str) -> None:
        """Take no more requests for an adapter; those in flight finish with it. Raises InvalidRequest if unknown."""
        self._adapters.unload(name)

    async def load_lora_async(self, name: str, folder: str | Path) -> None:
        """`load_lora` for event loops."""
        await _in_thread(self.load_lora, name, folder)

    async def unload_lora_async(self, name: str) -> None:
        """`unload_lora` for event loops."""
        await _in_thread(self.unload_lora, name)

    def submit(self, request: Promptlike) -> RequestHandle:
        """Queue a request. Keep the handle: the request is cancelled when it is garbage collected.

        Raises:
            InvalidRequest: a parameter is out of range, the prompt is empty, or the grammar does not compile.
            ContextTooLong: the prompt and `max_tokens` can never fit.
            Overloaded: the queue is full.
            Cancelled: the executor is shut down.
        """
        return self._submit(self._preparer.prepare(as_request(request)))

    async def submit_async(self, request: Promptlike, listener: RequestListener | None = None) -> RequestHandle:
        """`submit` for event loops: the prompt is tokenized, and a grammar compiled, in a worker thread.

        Args:
            request: as of `submit`.
            listener: hears of its outputs and its end, unless it is refused.
        """
        return self._submit(await _in_thread(self._preparer.prepare, as_request(request)), listener)

    def generate(
        self, prompts: Promptlike | Iterable[Promptlike], sampling: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Run a batch to its end; results in the order of the prompts.

        The batch may be larger than the queue: what does not fit waits here. After an error the rest is cancelled.

        Args:
            prompts: requests, texts, or lists of token ids; or a single request or text.
            sampling: for those that are no `Request` with a `sampling` of its own; None = the engine's defaults.

        Raises:
            AotllmError: as `submit`, for the first prompt that fails.
        """
        return self._run(map(self._preparer.prepare, _as_requests(prompts, sampling)))

    async def generate_async(
        self, prompts: Promptlike | Iterable[Promptlike], sampling: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """`generate` for event loops. Cancelling the task cancels the requests."""
        with RequestBatch() as batch:
            for request in _as_requests(prompts, sampling):
                prepared = await _in_thread(self._preparer.prepare, request)
                while not batch.add(lambda: self._submit(prepared)):  # noqa: B023 called at once
                    await batch.oldest()
            return [await handle for handle in batch.handles]

    def beam_search(self, request: Promptlike, params: BeamSearchParams | None = None) -> RequestOutput:
        """Search for the most likely answers as a whole, with the semantics of Hugging Face's `num_beams`.

        `sampling.n` of the beams are returned, best first, each with its `score`; `max_tokens`, `stop_token_ids` and
        `ignore_eos` say when they end. Nothing is drawn: temperature and filters have no effect.

        Raises:
            InvalidRequest: as `submit`; n above the beam width; stop strings, structured outputs, or other options that
                have no effect here.
            AotllmError: as `submit`.
        """
        prepared = self._preparer.prepare(as_request(request))
        driver = self._beam_search_driver(prepared, params)
        with self._adapters.held(prepared.request.adapter):
            while requests := driver.next_requests():
                driver.take(self._run(Prepared(step, step.sampling) for step in requests))
        return driver.result(self.tokenizer)

    async def beam_search_async(self, request: Promptlike, params: BeamSearchParams | None = None) -> RequestOutput:
        """`beam_search` for event loops. Cancelling the task ends the search."""
        prepared = await _in_thread(self._preparer.prepare, as_request(request))
        driver = self._beam_search_driver(prepared, params)
        with self._adapters.held(prepared.request.adapter):
            while requests := driver.next_requests():
                driver.take(await self._run_async([Prepared(step, step.sampling) for step in requests]))
        return driver.result(self.tokenizer)

    def embed(
        self, prompts: Promptlike | Iterable[Promptlike], pooling: Pooling = "mean", normalize: bool = True
    ) -> list[EmbeddingOutput]:
        """Embed a batch of prompts; results in their order. The batch may be larger than the queue.

        Args:
            prompts: as of `generate`. A request's own `pooling` counts if it has one.
            pooling: which hidden states make the embedding; see `aotllm.request.Pooling`.
            normalize: divide each embedding by its Euclidean length.

        Raises:
            AotllmError: as `submit`, for the first prompt that fails. A prompt may be as long as the context.
            TimedOut: a prompt's time was over before it was computed.
            Cancelled: the executor was shut down.
        """
        requests = (_to_embed(request, pooling) for request in _as_requests(prompts, None))
        results = self._run(map(self._preparer.prepare, requests))
        return [EmbeddingOutput.from_result(result, normalize) for result in results]

    async def embed_async(
        self, request: Promptlike, pooling: Pooling = "mean", normalize: bool = True
    ) -> EmbeddingOutput:
        """`embed` of one prompt for event loops. Cancelling the task cancels the request."""
        handle = await self.submit_async(_to_embed(as_request(request), pooling))
        return EmbeddingOutput.from_result(await handle, normalize)

    def shutdown(self, drain: bool = False) -> None:
        """Take no more requests and end. Idempotent; returns when all handles are finished.

        Args:
            drain: let requests that run or wait finish first; else they end as cancelled.
        """
        self._dispatcher.shutdown(drain)
        self._finalizer.detach()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, batch_of: Iterable[Prepared]) -> list[RequestOutput]:
        with RequestBatch() as batch:
            for prepared in batch_of:
                while not batch.add(lambda: self._submit(prepared)):  # noqa: B023 called at once
                    batch.oldest().result()
            return [handle.result() for handle in batch.handles]

    async def _run_async(self, batch_of: Iterable[Prepared]) -> list[RequestOutput]:
        with RequestBatch() as batch:
            for prepared in batch_of:
                while not batch.add(lambda: self._submit(prepared)):  # noqa: B023 called at once
                    await batch.oldest()
            return [await handle for handle in batch.handles]

    def _beam_search_driver(self, prepared: Prepared, params: BeamSearchParams | None) -> BeamSearchDriver:
        return BeamSearchDriver(
            prepared.request,
            params or BeamSearchParams(),
            self.engine.manifest.eos_token_ids,
            self.default_sampling,
            self._manager.vocab_size,
        )

    def _submit(self, prepared: Prepared, listener: RequestListener | None = None) -> RequestHandle:
        request = prepared.request
        request_id, stream = self._dispatcher.submit(
            request, lambda index: self._preparer.assembler(prepared, index), listener
        )
        return RequestHandle(request_id, tuple(request.prompt_token_ids), stream, self._dispatcher.cancel, self)


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    import asyncio  # here: callers without a loop need not import it

    return await asyncio.to_thread(function, *args)


def _as_requests(prompts: Promptlike | Iterable[Promptlike], sampling: SamplingParams | None) -> list[Request]:
    batch: Iterable[Promptlike] = [prompts] if isinstance(prompts, (str, Request)) else prompts  # type: ignore[assignment]
    return [as_request(prompt, sampling) for prompt in batch]


def _to_embed(request: Request, pooling: Pooling) -> Request:
    return request if request.pooling is not None else dataclasses.replace(request, pooling=pooling)


def engine_sampling(engine: Engine) -> SamplingParams:
    """Sampling of requests that bring none: the checkpoint's generation_config.json. Raises EngineError."""
    try:
        return SamplingParams.from_generation_config(engine.generation_config)
    except InvalidRequest as error:
        raise EngineError(f"{engine.path / 'generation_config.json'}: {error.message}") from error
