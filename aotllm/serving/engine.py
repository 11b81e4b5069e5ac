"""`ServingEngine`: what the protocols need of an engine, wherever it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from aotllm.beam_search import BeamSearchParams
from aotllm.kv_memory import KvMemory
from aotllm.request import Promptlike, RequestOutput
from aotllm.request_handle import RequestHandle, RequestListener
from aotllm.sampling_params import SamplingParams
from aotllm.stats import ExecutorStats

if TYPE_CHECKING:
    from aotllm.engines import Engine
    from aotllm.tokenization import Tokenizer


class ServingEngine(Protocol):
    """An `Executor` in this process, or the client of an engine process. Coroutines run on the caller's loop."""

    engine: Engine
    tokenizer: Tokenizer
    default_sampling: SamplingParams

    @property
    def max_seq_len(self) -> int:
        """Most tokens of a request, prompt and answer together."""

    @property
    def alive(self) -> bool:
        """Takes requests."""

    @property
    def lora_names(self) -> tuple[str, ...]:
        """LoRA adapters that requests can name now."""

    async def submit_async(self, request: Promptlike, listener: RequestListener | None = None) -> RequestHandle:
        """Queue a request. Raises what `Executor.submit` raises; the listener is not told of that."""

    async def beam_search_async(self, request: Promptlike, params: BeamSearchParams | None = None) -> RequestOutput:
        """Run a beam search to its end."""

    async def stats_async(self) -> ExecutorStats:
        """Counters of the runtime."""

    async def memory_async(self) -> KvMemory:
        """What the KV memory buys."""

    async def load_lora_async(self, name: str, folder: str) -> None:
        """Load an adapter. Raises what `Executor.load_lora` raises."""

    async def unload_lora_async(self, name: str) -> None:
        """Take no more requests for an adapter. Raises InvalidRequest if unknown."""
