"""`Executor`: runs one engine for many requests at a time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from aotllm.dispatcher import Dispatcher
from aotllm.errors import ContextTooLong, EngineError, InvalidRequest, Overloaded
from aotllm.manager import ExecutorConfig, ManagerFactory, ManagerRequest, RuntimeManager
from aotllm.output_assembler import OutputAssembler
from aotllm.request import Promptlike, Request, RequestOutput, as_request
from aotllm.request_handle import RequestHandle
from aotllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aotllm.engines import Engine
    from aotllm.tokenization import Tokenizer


_RESERVED_TEMPLATE_NAMES = {
    "messages",
    "add_generation_prompt",
    "tools",
    "add_special_tokens",
    "bos_token",
    "eos_token",
}


class _Prepared(NamedTuple):
    """A request that has been tokenized and checked."""

    request: ManagerRequest
    sampling: SamplingParams


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
        num_threads, num_kv_blocks, max_queue_size, max_batch_size, max_num_tokens, max_chunk_tokens: see
            `aotllm.manager.ExecutorConfig`.
        verify: compare the digests of the bundle's files first, about a second per GB; else only their sizes.
        manager_factory: makes the in-flight-batching loop; None = the compiled one. For tests.

    Raises:
        EngineError: the bundle is missing or damaged.
        EngineIncompatible: it was built for another machine or version.
        InvalidRequest: a size is out of range.
    """

    def __init__(
        self,
        engine: str | Path | Engine,
        *,
        num_threads: int = 0,
        num_kv_blocks: int = 0,
        max_queue_size: int = 1024,
        max_batch_size: int = 0,
        max_num_tokens: int = 0,
        max_chunk_tokens: int = 0,
        verify: bool = True,
        manager_factory: ManagerFactory | None = None,
    ) -> None:
        config = ExecutorConfig(
            num_threads, num_kv_blocks, max_queue_size, max_batch_size, max_num_tokens, max_chunk_tokens
        )
        if isinstance(engine, (str, Path)):
            from aotllm.engines import open_engine

            engine = open_engine(engine, verify=verify)
        self.engine = engine
        self.tokenizer: Tokenizer = engine.tokenizer()
        self.default_sampling = _engine_sampling(engine)
        """Sampling of requests that bring none: the checkpoint's generation_config.json"""
        self._manager = (manager_factory or RuntimeManager)(engine.rank_file(0), config, engine.manifest.eos_token_ids)
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

    def stats(self) -> Any:
        """Counters of the runtime, as in `_runtime.Stats`."""
        return self._manager.stats()

    def submit(self, request: Promptlike) -> RequestHandle:
        """Queue a request. Keep the handle: the request is cancelled when it is garbage collected.

        Raises:
            InvalidRequest: a parameter is out of range, or the prompt is empty.
            ContextTooLong: the prompt and `max_tokens` can never fit.
            Overloaded: the queue is full.
            Cancelled: the executor is shut down.
        """
        return self._submit(self._prepare(as_request(request)))

    async def submit_async(self, request: Promptlike) -> RequestHandle:
        """`submit` for event loops: the prompt is tokenized in a worker thread."""
        return self._submit(await asyncio.to_thread(self._prepare, as_request(request)))

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
        with _Batch() as batch:
            for request in _as_requests(prompts, sampling):
                prepared = self._prepare(request)
                while not batch.add(lambda: self._submit(prepared)):  # noqa: B023 called at once
                    batch.oldest().result()
            return [handle.result() for handle in batch.handles]

    async def generate_async(
        self, prompts: Promptlike | Iterable[Promptlike], sampling: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """`generate` for event loops. Cancelling the task cancels the requests."""
        with _Batch() as batch:
            for request in _as_requests(prompts, sampling):
                prepared = await asyncio.to_thread(self._prepare, request)
                while not batch.add(lambda: self._submit(prepared)):  # noqa: B023 called at once
                    await batch.oldest()
            return [await handle for handle in batch.handles]

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

    def _submit(self, prepared: _Prepared) -> RequestHandle:
        request, sampling = prepared
        request_id, stream = self._dispatcher.submit(request, lambda: self._assembler(request, sampling))
        return RequestHandle(request_id, tuple(request.prompt_token_ids), stream, self._dispatcher.cancel, self)

    def _prepare(self, request: Request) -> _Prepared:
        sampling = request.sampling or self.default_sampling
        prompt = self._encode(request)
        room = self.max_seq_len - len(prompt)
        wanted = 1 if sampling.max_tokens is None else sampling.max_tokens
        if room < wanted:
            raise ContextTooLong(
                f"This model's maximum context length is {self.max_seq_len} tokens. However, the prompt has "
                f"{len(prompt)} and {wanted} output token{'s' * (wanted != 1)} were requested, {len(prompt) + wanted} "
                "in all. Shorten the prompt or lower max_tokens.",
                _prompt_field(request) if room < 1 else "max_tokens",
            )
        sampling = sampling.replace(max_tokens=room if sampling.max_tokens is None else sampling.max_tokens)
        return _Prepared(ManagerRequest(prompt, sampling, request.priority, request.return_logits), sampling)

    def _encode(self, request: Request) -> tuple[int, ...]:
        if request.prompt_token_ids is not None:
            prompt = tuple(request.prompt_token_ids)
            vocab_size = self._manager.vocab_size
            for token_id in prompt:
                if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"prompt_token_ids has {token_id!r}; token ids are integers from 0 to {vocab_size - 1}",
                        "prompt_token_ids",
                    )
            return prompt
        if request.messages is not None:
            reserved = _RESERVED_TEMPLATE_NAMES & request.chat_template_kwargs.keys()
            if reserved:
                raise InvalidRequest(
                    f"chat_template_kwargs may not set {min(reserved)}, which aotllm itself sets",
                    "chat_template_kwargs",
                )
            return tuple(self.tokenizer.encode_chat(request.messages, **request.chat_template_kwargs))
        assert request.prompt is not None
        prompt = tuple(self.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens))
        if not prompt:
            raise InvalidRequest("the prompt is empty: it has no tokens", "prompt")
        return prompt

    def _assembler(self, request: ManagerRequest, sampling: SamplingParams) -> OutputAssembler:
        from aotllm.tokenization import IncrementalDetokenizer

        detokenizer = IncrementalDetokenizer(
            self.tokenizer, request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        return OutputAssembler(detokenizer, sampling)


class _Batch:
    """The handles of `generate`: submitted as the queue has room, cancelled when the batch fails."""

    def __init__(self) -> None:
        self.handles: list[RequestHandle] = []
        self._oldest = 0

    def add(self, submit: Callable[[], RequestHandle]) -> bool:
        """False if the queue is full and `oldest()` has to be waited for. Raises Overloaded if it is full of others."""
        try:
            self.handles.append(submit())
        except Overloaded:
            if self._oldest == len(self.handles):
                raise
            return False
        return True

    def oldest(self) -> RequestHandle:
        """The oldest handle that has not been waited for."""
        self._oldest += 1
        return self.handles[self._oldest - 1]

    def __enter__(self) -> _Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for handle in self.handles:
                handle.cancel()


def _as_requests(prompts: Promptlike | Iterable[Promptlike], sampling: SamplingParams | None) -> list[Request]:
    batch: Iterable[Promptlike] = [prompts] if isinstance(prompts, (str, Request)) else prompts  # type: ignore[assignment]
    return [as_request(prompt, sampling) for prompt in batch]


def _engine_sampling(engine: Engine) -> SamplingParams:
    try:
        return SamplingParams.from_generation_config(engine.generation_config)
    except InvalidRequest as error:
        raise EngineError(f"{engine.path / 'generation_config.json'}: {error.message}") from error


def _prompt_field(request: Request) -> str:
    if request.messages is not None:
        return "messages"
    return "prompt" if request.prompt is not None else "prompt_token_ids"
