"""The seam between the Python `Executor` and the compiled runtime: what an executor needs of a manager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aotllm.cuda_libraries import find_cublaslt
from aotllm.engines.bundle import TACTICS_FILE
from aotllm.errors import InvalidRequest
from aotllm.executor_config import ExecutorConfig
from aotllm.request import Pooling
from aotllm.sampling_params import SamplingParams
from aotllm.tuning import stored_tactics

if TYPE_CHECKING:
    from aotllm import _runtime

ALL_SEQUENCES = -1
"""In place of a sequence index, to cancel the whole request"""


@dataclass(frozen=True)
class ManagerRequest:
    """A request in the runtime's terms: tokens in, tokens out."""

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    """`max_tokens` is set; stop strings, and which answers are kept, are the executor's business"""
    n: int = 1
    """Sequences, those that `best_of` leaves out included"""
    logprobs: int | None = None
    """None = none; k ≥ 0: log-probability of each generated token and of the k most likely ones"""
    prompt_logprobs: int | None = None
    priority: int = 0
    return_logits: bool = False
    timeout: float = 0.0
    """Seconds; 0 = none"""
    cache_salt: str = ""
    retention_priority: int = 35
    adapter: int = 0
    """0 = the bare model"""
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    """`sampling.bad_words` in tokens: the answer must not complete any of these sequences"""
    constraint: _runtime.Constraint | None = None
    """Start state of the grammar that the answer keeps to"""
    pooling: Pooling | None = None
    """The answer is an embedding: of the prompt's hidden states after the final norm the last one, or their mean"""


class SequenceTimings(Protocol):
    """Seconds from submit, as in `_runtime.SequenceTimings`."""

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float


class Response(Protocol):
    """News of one sequence of a request, as in `_runtime.Response`; the last one has `finish_reason` set, or, for all
    sequences together, `error_kind`."""

    request_id: int
    sequence_index: int
    token_ids: list[int]
    logprobs: list[Any]
    logits: list[Any]
    finish_reason: str | None
    stop_token_id: int | None
    error_kind: str | None
    error_message: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[Any]
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def embedding(self) -> Any:
        """float32 `[hidden_size]` in the last response of a request with pooling; None in others."""

    @property
    def timings(self) -> SequenceTimings | None:
        """In the last response of a sequence."""


class Manager(Protocol):
    """What `Executor` needs of the in-flight-batching loop; tests pass a fake. All methods are thread-safe."""

    def submit(self, request: ManagerRequest) -> int:
        """Id of the queued request. Raises InvalidRequest, ContextTooLong, Overloaded or Cancelled (shut down)."""

    def cancel(self, request_id: int, sequence_index: int = ALL_SEQUENCES) -> None:
        """Ask for an end; no-op for a finished or unknown id or index. The last responses say cancelled."""

    def poll(self, timeout: float) -> Sequence[Response]:
        """All responses that are ready, in order; waits up to `timeout` seconds for the first one."""

    def stats(self) -> Any:
        """Counters, as in `_runtime.Stats`."""

    def memory(self) -> Any:
        """What the KV memory buys, as in `_runtime.KvMemory`."""

    def kv_events(self) -> Sequence[Any]:
        """News of the prefix cache since the last call, as in `_runtime.KvEvent`, in order."""

    def load_adapter(self, adapter_id: int, adapter: Any) -> None:
        """Make a LoRA adapter known under an id that was never used before. Raises InvalidRequest where its shapes
        are not the model's."""

    def unload_adapter(self, adapter_id: int) -> None:
        """Free an adapter once no request uses it; no-op for an unknown id. New requests with it are refused."""

    def shutdown(self, drain: bool = False) -> None:
        """Idempotent. drain=True lets requests finish; else they end as cancelled."""

    @property
    def max_seq_len(self) -> int:
        """Prompt and answer together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""


ManagerFactory = Callable[[Path, ExecutorConfig, Sequence[int], "Path | None"], Manager]
"""(rank file, configuration, end token ids, rank file of the draft engine) -> manager"""

_SAME_IN_RUNTIME = (
    "num_threads",
    "device",
    "deterministic",
    "num_kv_blocks",
    "max_queue_size",
    "max_queued_tokens",
    "max_batch_size",
    "max_num_tokens",
    "max_chunk_tokens",
    "capacity_policy",
    "queue_policy",
    "max_wait_steps",
    "max_kv_events",
    "stuck_step_seconds",
    "num_speculative_tokens",
    "ngram_max",
    "ngram_min",
)
"""Fields that have name and meaning in common with `_runtime.ManagerConfig`"""


_OTHER_IN_RUNTIME = {
    "kv_cache_bytes": "kv_cache_memory",
    "kv_cache_tokens": "kv_cache_memory",
    "kv_cache_fraction": "kv_cache_memory",
    "kv_host_bytes": "kv_host_memory",
}
"""Fields of `_runtime.ManagerConfig` -> where their values come from"""


def _in_our_terms(error: InvalidRequest, config: ExecutorConfig) -> InvalidRequest:
    """A refusal of the configuration, with the name of the field that the user knows."""
    param = error.param or ""
    if param == "num_blocks":  # the runner's word, whichever field it was
        ours = "num_kv_blocks" if config.kv_cache_memory is None else "kv_cache_memory"
        return InvalidRequest(f"{ours}: {error.message}", ours)
    ours = _OTHER_IN_RUNTIME.get(param, param)
    return InvalidRequest(error.message.replace(param, ours) if param else error.message, ours or None)


class RuntimeManager:
    """`_runtime.GptManager` behind the `Manager` protocol; a `ManagerFactory`."""

    def __init__(
        self,
        rank_file: Path,
        config: ExecutorConfig,
        eos_token_ids: Sequence[int],
        draft_rank_file: Path | None = None,
    ) -> None:
        from aotllm import _runtime

        self._runtime = _runtime
        native = self._native_config(config)
        native.eos_token_ids = list(eos_token_ids)
        native.tactics = stored_tactics(rank_file.parent)
        native.draft_rank_file = "" if draft_rank_file is None else str(draft_rank_file)
        try:
            self._manager = self._make(rank_file, native)
        except InvalidRequest as error:
            raise _in_our_terms(error, config) from None
        self._say_which_tactics(rank_file.parent / TACTICS_FILE, native.tactics)
        self.cancel = self._manager.cancel
        self.poll = self._manager.poll
        self.stats = self._manager.stats
        self.memory = self._manager.memory
        self.kv_events = self._manager.kv_events
        self.load_adapter = self._manager.load_adapter
        self.unload_adapter = self._manager.unload_adapter
        self.shutdown = self._manager.shutdown

    def _make(self, rank_file: Path, config: _runtime.ManagerConfig) -> _runtime.GptManager:
        return self._runtime.GptManager(str(rank_file), config)

    def _say_which_tactics(self, path: Path, text: str) -> None:
        logger = logging.getLogger(__name__)
        if note := self._manager.tactics_note:
            logger.warning("%s: %s", path, note)
        elif text:
            logger.info("%s: its tactics are used", path)

    def submit(self, request: ManagerRequest) -> int:
        """See `Manager.submit`."""
        native = self._runtime.Request()
        native.prompt_token_ids = list(request.prompt_token_ids)
        native.sampling = self._native_sampling(request)
        native.priority = request.priority
        native.logprobs = -1 if request.logprobs is None else request.logprobs
        native.prompt_logprobs = -1 if request.prompt_logprobs is None else request.prompt_logprobs
        native.return_logits = request.return_logits
        native.constraint = request.constraint
        native.n = request.n
        native.timeout = request.timeout
        native.cache_salt = request.cache_salt
        native.retention_priority = request.retention_priority
        native.adapter = request.adapter
        native.pooling = request.pooling or "none"
        return self._manager.submit(native)

    def _native_config(self, config: ExecutorConfig) -> _runtime.ManagerConfig:
        native = self._runtime.ManagerConfig()
        for name in _SAME_IN_RUNTIME:
            setattr(native, name, getattr(config, name))
        size = config.kv_memory_size
        native.kv_cache_bytes, native.kv_cache_tokens, native.kv_cache_fraction = (
            size.num_bytes,
            size.tokens,
            size.fraction,
        )
        native.kv_host_bytes = config.kv_host_bytes
        native.devices = list(config.device_numbers)
        native.cublaslt = find_cublaslt()
        native.enable_prefix_caching = config.prefix_caching
        native.speculative = config.speculation
        return native

    def _native_sampling(self, request: ManagerRequest) -> _runtime.SamplingParams:
        sampling = request.sampling
        assert sampling.max_tokens is not None
        native = self._runtime.SamplingParams()
        native.max_tokens = sampling.max_tokens
        native.temperature = sampling.temperature
        native.top_k = sampling.top_k
        native.top_p = sampling.top_p
        native.min_p = sampling.min_p
        native.typical_p = sampling.typical_p
        native.repetition_penalty = sampling.repetition_penalty
        native.presence_penalty = sampling.presence_penalty
        native.frequency_penalty = sampling.frequency_penalty
        native.no_repeat_ngram_size = sampling.no_repeat_ngram_size
        native.logit_bias = dict(sampling.logit_bias)
        native.allowed_token_ids = list(sampling.allowed_token_ids or ())
        native.bad_words = [list(word) for word in request.bad_words_token_ids]
        native.min_tokens = sampling.min_tokens
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
