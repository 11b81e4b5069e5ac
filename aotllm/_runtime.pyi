"""Types of the compiled runtime (`runtime_cpp/src/bindings/`). Errors are the classes of `aotllm.errors`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def cpu_isa() -> str:
    """The ISA whose kernels run here: avx2 | avx512 | avx512_vnni. Honours AOTLLM_FORCE_ISA (a lower one only).
    Raises EngineIncompatible on a machine without AVX2+FMA+F16C."""

def default_num_threads() -> int:
    """Threads that the CPU target uses unless told: CPUs of the affinity mask, limited by the cgroup's CPU quota."""

class CpuRunner:
    """Steps of an engine without the manager: scoring, tests, benchmarks."""

    def __init__(self, rank_file: str, num_blocks: int, num_threads: int = 0) -> None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def max_num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def step(
        self,
        tokens: Sequence[Sequence[int]],
        start_positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        logits: Sequence[str],
    ) -> npt.NDArray[np.float32]:
        """One step over several sequences; `logits` per sequence: none | last | all. Returns [rows, vocab_size]."""

class SamplingParams:
    """Plain values; validated by GptManager.submit. Attribute names and defaults as in aotllm.SamplingParams."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop_token_ids: list[int]
    ignore_eos: bool
    def __init__(self) -> None: ...

class Request:
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int
    logprobs: int
    """-1 = none; n ≥ 0: log-probability of each generated token and of the n most likely ones"""
    return_logits: bool
    """Attach the raw logits row of each generated token to its response (tests, TensorRT-LLM's generation_logits)"""
    def __init__(self) -> None: ...

class TokenLogprobs:
    token_id: int
    logprob: float
    top: list[tuple[int, float]]

class Response:
    """News of one request after a step; the last one has finish_reason or error_kind set."""

    request_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    logits: list[npt.NDArray[np.float32]]
    finish_reason: str | None
    """None while running; stop | length | cancelled | error"""
    stop_token_id: int | None
    """The EOS or stop token that ended the request; it is in token_ids"""
    error_kind: str | None
    error_message: str | None
    num_prompt_tokens: int
    num_cached_tokens: int

class ManagerConfig:
    num_threads: int
    """0 = default_num_threads()"""
    num_kv_blocks: int
    """0 = enough for max_batch_size sequences of max_seq_len, at most a quarter of the free memory"""
    max_batch_size: int
    """0 = the engine's"""
    max_num_tokens: int
    """0 = the engine's; tokens per step over all sequences"""
    max_chunk_tokens: int
    """0 = no limit below max_num_tokens; largest context chunk of one request in one step"""
    max_queue_size: int
    eos_token_ids: list[int]
    def __init__(self) -> None: ...

class Stats:
    steps: int
    queued: int
    running: int
    finished: int
    context_tokens: int
    generated_tokens: int
    blocks_total: int
    blocks_used: int
    preemptions: int

class GptManager:
    """The in-flight-batching loop on a C++ thread of its own. All methods are thread-safe and release the GIL."""

    def __init__(self, rank_file: str, config: ManagerConfig) -> None: ...
    def submit(self, request: Request) -> int:
        """Request id. Raises InvalidRequest, ContextTooLong (can never fit), Overloaded (queue full), Cancelled
        (shut down)."""

    def cancel(self, request_id: int) -> None:
        """No-op for a finished or unknown id. The request's last response says cancelled."""

    def poll(self, timeout: float) -> list[Response]:
        """All responses that are ready, of any request, in order; waits up to `timeout` seconds for the first one.
        Empty on time-out, and at once after shutdown when nothing is left."""

    def stats(self) -> Stats: ...
    def shutdown(self, drain: bool = False) -> None:
        """Idempotent. drain=True lets running and queued requests finish; else they end as cancelled."""
    @property
    def max_seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
