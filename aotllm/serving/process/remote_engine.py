"""`RemoteEngine`: a `ServingEngine` whose manager runs in the engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from aotllm.adapters import unknown_adapter
from aotllm.beam_search import BeamSearchParams
from aotllm.beam_search_driver import BeamSearchDriver
from aotllm.engines import Engine
from aotllm.executor import engine_sampling
from aotllm.kv_memory import KvMemory
from aotllm.request import Promptlike, Request, RequestOutput, as_request
from aotllm.request_batch import RequestBatch
from aotllm.request_handle import RequestHandle, RequestListener
from aotllm.request_preparer import Prepared, RequestPreparer
from aotllm.serving.process.engine_link import EngineLink
from aotllm.serving.process.messages import ModelState
from aotllm.serving.process.plain import namespace
from aotllm.stats import ExecutorStats
from aotllm.structured_outputs import StructuredOutputs

_SHORT = 2048
"""Characters, or tokens, of a prompt that does not hold up an event loop"""


class RemoteEngine:
    """Renders, tokenizes and detokenizes here; the engine process gets tokens and gives tokens.

    Args:
        link: to the engine process.
        engine: the bundle, opened for its tokenizer and manifest.
        state: what the engine process says of it.
        timeout: seconds, of requests that set none; 0 = none.
    """

    def __init__(self, link: EngineLink, engine: Engine, state: ModelState, timeout: float) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer()
        self.default_sampling = engine_sampling(engine)
        self.state = state
        self._link = link
        self._preparer = RequestPreparer(
            self.tokenizer, self.default_sampling, timeout, state, self._adapter_id, StructuredOutputs.to_grammar
        )

    @property
    def max_seq_len(self) -> int:
        """See `ServingEngine.max_seq_len`."""
        return self.state.max_seq_len

    @property
    def alive(self) -> bool:
        """See `ServingEngine.alive`."""
        return self._link.connected and self.state.alive

    @property
    def lora_names(self) -> tuple[str, ...]:
        """See `ServingEngine.lora_names`."""
        return tuple(self.state.adapters)

    async def submit_async(self, request: Promptlike, listener: RequestListener | None = None) -> RequestHandle:
        """See `ServingEngine.submit_async`."""
        return await self._submit(await self._prepare(as_request(request)), listener)

    async def beam_search_async(self, request: Promptlike, params: BeamSearchParams | None = None) -> RequestOutput:
        """See `ServingEngine.beam_search_async`. An adapter that is unloaded meanwhile ends the search."""
        prepared = await self._prepare(as_request(request))
        driver = BeamSearchDriver(
            prepared.request,
            params or BeamSearchParams(),
            self.engine.manifest.eos_token_ids,
            self.default_sampling,
            self.state.vocab_size,
        )
        while requests := driver.next_requests():
            driver.take(await self._run([Prepared(step, step.sampling) for step in requests]))
        return driver.result(self.tokenizer)

    async def stats_async(self) -> ExecutorStats:
        """See `ServingEngine.stats_async`."""
        return ExecutorStats.from_native(namespace(await self._link.query("stats", self.state.name)))

    async def memory_async(self) -> KvMemory:
        """See `ServingEngine.memory_async`."""
        return KvMemory.from_native(namespace(await self._link.query("memory", self.state.name)))

    async def load_lora_async(self, name: str, folder: str | Path) -> None:
        """See `ServingEngine.load_lora_async`. The engine process reads the folder."""
        await self._link.query("load_lora", self.state.name, name, str(folder))

    async def unload_lora_async(self, name: str) -> None:
        """See `ServingEngine.unload_lora_async`."""
        await self._link.query("unload_lora", self.state.name, name)

    async def _prepare(self, request: Request) -> Prepared:
        # To change to a thread and back takes longer than to tokenize a short prompt.
        if request.structured_outputs is None and _length(request) <= _SHORT:
            return self._preparer.prepare(request)
        return await asyncio.to_thread(self._preparer.prepare, request)

    async def _submit(self, prepared: Prepared, listener: RequestListener | None = None) -> RequestHandle:
        request = prepared.request
        request_id, stream = await self._link.submit(
            self.state.name, request, lambda index: self._preparer.assembler(prepared, index), listener
        )
        return RequestHandle(request_id, tuple(request.prompt_token_ids), stream, self._link.cancel, self)

    async def _run(self, batch: Sequence[Prepared]) -> list[RequestOutput]:
        """Run a batch to its end; it may be larger than the queue."""
        with RequestBatch() as running:
            for prepared in batch:
                while not await running.add_async(lambda: self._submit(prepared)):  # noqa: B023 called at once
                    await running.oldest()
            return [await handle for handle in running.handles]

    def _adapter_id(self, name: str | None) -> int:
        if name is None:
            return 0
        adapters = self.state.adapters
        if name not in adapters:
            raise unknown_adapter(name, adapters)
        return adapters[name]


def _length(request: Request) -> int:
    """Of the prompt: characters, or tokens; of a chat, those that its text contents have, and more than any limit for
    other contents."""
    if request.messages is None:
        return len(request.prompt if request.prompt is not None else request.prompt_token_ids or ())
    if request.tools:
        return _SHORT + 1
    contents = [message.get("content") for message in request.messages]
    return sum(len(content) if isinstance(content, str) else _SHORT + 1 for content in contents)
