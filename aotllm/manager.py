"""The seam between the Python `Executor` and the compiled runtime: what an executor needs of a manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter
from aotllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aotllm import _runtime


@documented
@dataclass(frozen=True)
class ExecutorConfig:
    """Sizes that are chosen when an engine is loaded, within those it was built for."""

    num_threads: int = parameter(
        0, ParameterSpec("Threads of the CPU target; 0 = the CPUs that this process may use.", int, low=0, high=4096)
    )
    num_kv_blocks: int = parameter(
        0,
        ParameterSpec(
            "Blocks of the KV cache; 0 = enough for a full batch of full length, at most a quarter of free memory.",
            int,
            low=0,
            high=2**31 - 1,
        ),
    )
    max_queue_size: int = parameter(
        1024,
        ParameterSpec("Most requests that wait; one more is refused as overloaded.", int, low=0, high=2**31 - 1),
    )
    max_batch_size: int = parameter(
        0, ParameterSpec("Most requests that run at a time; 0 = the engine's.", int, low=0, high=2**31 - 1)
    )
    max_num_tokens: int = parameter(
        0,
        ParameterSpec("Most tokens of one step, all requests together; 0 = the engine's.", int, low=0, high=2**31 - 1),
    )
    max_chunk_tokens: int = parameter(
        0, ParameterSpec("Most prompt tokens of one request in one step; 0 = no limit.", int, low=0, high=2**31 - 1)
    )

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class ManagerRequest:
    """A request in the runtime's terms: tokens in, tokens out."""

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    """`max_tokens` is set; stop strings are the executor's business"""
    priority: int = 0
    return_logits: bool = False


class Response(Protocol):
    """News of one request, as in `_runtime.Response`; the last one has `finish_reason` or `error_kind` set."""

    request_id: int
    token_ids: list[int]
    logprobs: list[Any]
    logits: list[Any]
    finish_reason: str | None
    stop_token_id: int | None
    error_kind: str | None
    error_message: str | None
    num_prompt_tokens: int
    num_cached_tokens: int


class Manager(Protocol):
    """What `Executor` needs of the in-flight-batching loop; tests pass a fake. All methods are thread-safe."""

    def submit(self, request: ManagerRequest) -> int:
        """Id of the queued request. Raises InvalidRequest, ContextTooLong, Overloaded or Cancelled (shut down)."""

    def cancel(self, request_id: int) -> None:
        """Ask for an end; no-op for a finished or unknown id. The request's last response says cancelled."""

    def poll(self, timeout: float) -> Sequence[Response]:
        """All responses that are ready, in order; waits up to `timeout` seconds for the first one."""

    def stats(self) -> Any:
        """Counters, as in `_runtime.Stats`."""

    def shutdown(self, drain: bool = False) -> None:
        """Idempotent. drain=True lets requests finish; else they end as cancelled."""

    @property
    def max_seq_len(self) -> int:
        """Prompt and answer together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""


ManagerFactory = Callable[[Path, ExecutorConfig, Sequence[int]], Manager]
"""(rank file, sizes, end token ids) -> manager"""


class RuntimeManager:
    """`_runtime.GptManager` behind the `Manager` protocol."""

    def __init__(self, rank_file: Path, config: ExecutorConfig, eos_token_ids: Sequence[int]) -> None:
        from aotllm import _runtime

        self._runtime = _runtime
        native = _runtime.ManagerConfig()
        native.num_threads = config.num_threads
        native.num_kv_blocks = config.num_kv_blocks
        native.max_batch_size = config.max_batch_size
        native.max_num_tokens = config.max_num_tokens
        native.max_chunk_tokens = config.max_chunk_tokens
        native.max_queue_size = config.max_queue_size
        native.eos_token_ids = list(eos_token_ids)
        self._manager = _runtime.GptManager(str(rank_file), native)
        self.cancel = self._manager.cancel
        self.poll = self._manager.poll
        self.stats = self._manager.stats
        self.shutdown = self._manager.shutdown

    def submit(self, request: ManagerRequest) -> int:
        """See `Manager.submit`."""
        native = self._runtime.Request()
        native.prompt_token_ids = list(request.prompt_token_ids)
        native.sampling = self._native_sampling(request.sampling)
        native.priority = request.priority
        native.logprobs = -1 if request.sampling.logprobs is None else request.sampling.logprobs
        native.return_logits = request.return_logits
        return self._manager.submit(native)

    def _native_sampling(self, sampling: SamplingParams) -> _runtime.SamplingParams:
        assert sampling.max_tokens is not None
        native = self._runtime.SamplingParams()
        native.max_tokens = sampling.max_tokens
        native.temperature = sampling.temperature
        native.top_k = sampling.top_k
        native.top_p = sampling.top_p
        native.min_p = sampling.min_p
        native.seed = None if sampling.seed is None else sampling.seed & (2**64 - 1)
        native.stop_token_ids = list(sampling.stop_token_ids)
        native.ignore_eos = sampling.ignore_eos
        return native

    @property
    def max_seq_len(self) -> int:
        """See `Manager.max_seq_len`."""
        return self._manager.max_seq_len

    @property
    def vocab_size(self) -> int:
        """See `Manager.vocab_size`."""
        return self._manager.vocab_size
