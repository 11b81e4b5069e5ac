"""Types of the compiled runtime (`runtime_cpp/src/bindings/`). Errors are the classes of `aotllm.errors`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def cpu_isa() -> str:
    """The ISA whose kernels run here: avx2 | avx512 | avx512_vnni | avx512_bf16 | amx. Honours AOTLLM_FORCE_ISA (a
    lower one only).
    Raises EngineIncompatible on a machine without AVX2+FMA+F16C."""

def has_cuda() -> bool:
    """Whether this build can run engines of target cuda."""

def quantize_e4m3(
    rows: npt.NDArray[Any], first: int, last: int, factors: Sequence[float]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Rows `[n, k]` of float32, float16, or uint16 for the bits of bfloat16, in C order → E4M3 codes of columns first …
    last - 1, and scales `[n]` of whole rows: of max|w| / 448 times each of the factors, in [1, 2), the one with the
    least squared error; not finite where a value of the row is not. Other threads of Python go on meanwhile.
    Raises InvalidRequest."""

def default_num_threads() -> int:
    """Threads that the CPU target uses unless told: CPUs of the affinity mask, limited by the cgroup's CPU quota."""

class Adapter:
    """Low-rank updates of a model's linears, to be loaded into a runner."""

    def __init__(self) -> None: ...
    def add(self, layer: int, module: str, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> None:
        """y += b · (a · x) beside linear `module` (q | k | v | o | gate | up | down): a [rank, in], b [out, rank] with
        the scale multiplied in; both are copied. Raises InvalidRequest for an unknown module or shapes that do not go
        together; whether they fit an engine is checked when the adapter is loaded."""

    def __len__(self) -> int: ...

class Runner:
    """Steps of an engine without the manager: scoring, tests, benchmarks."""

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
        adapters: Sequence[int] = (),
    ) -> npt.NDArray[np.float32]:
        """One step over several sequences; `logits` per sequence: none | last | all; `adapters` per sequence: id of a
        loaded adapter, 0 = none (empty: none at all). Returns [rows, vocab_size]."""

    def load_adapter(self, adapter_id: int, adapter: Adapter) -> None:
        """Makes `adapter` available to steps as `adapter_id` ≥ 1. Raises InvalidRequest, naming the tensor, where it
        does not fit the engine; Internal for an id that is taken."""

    def unload_adapter(self, adapter_id: int) -> None:
        """Frees a loaded adapter. Raises Internal for an id that is not loaded."""

    @property
    def adapter_bytes(self) -> int:
        """Memory of the loaded adapters, with what steps need for them"""

class CpuRunner(Runner):
    """Runs engines of target cpu."""

    def __init__(self, rank_file: str, num_blocks: int, num_threads: int = 0, tactics: str = "") -> None:
        """`tactics`: text of tactics.json. Raises EngineError where it is damaged."""

    @property
    def tactics_note(self) -> str:
        """Why `tactics` are left aside; empty = they are not, or there are none"""

class CudaRunner(Runner):
    """Runs engines of target cuda; only in builds that have CUDA."""

    def __init__(
        self,
        rank_file: str,
        num_blocks: int,
        device: int = 0,
        deterministic: bool = False,
        graphs: bool = True,
        cublaslt: str = "",
        tactics: str = "",
        devices: Sequence[int] = (),
    ) -> None: ...

def tune_cpu(rank_file: str, num_threads: int = 0, seconds: float = 20.0) -> dict[str, Any]:
    """Times how steps of an engine of target cpu may be run on this machine: what tactics.json holds, but for its
    version. 0 threads = as many as an executor takes."""

def tune(rank_file: str, device: int = 0, cublaslt: str = "") -> list[dict[str, Any]]:
    """Times the kernels of an engine's linears on the GPU: the records of tactics.json.

    Raises EngineIncompatible in builds without CUDA, and where the GPU is none for this engine."""

def dequantize_panels(format: str, n: int, k: int, panels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The weights [n, k] of a packed segment, as the kernels read them."""

class CompactTokens:
    """The vocabulary and merges of an engine's `tokenizer.tokens`. Raises EngineError where the file is damaged."""

    def __init__(self, path: str) -> None: ...
    def __len__(self) -> int: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def special_ids(self) -> list[int]: ...
    def markup_ids(self) -> list[int]: ...
    def text(self, name: str) -> str: ...
    def encode(self, text: str, pieces: list[int], spans: list[tuple[int, int]], added: list[int]) -> list[int]: ...

class SamplingParams:
    """Plain values; validated by GptManager.submit. Attribute names and defaults as in aotllm.SamplingParams."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    logit_bias: dict[int, float]
    allowed_token_ids: list[int]
    """Empty = all"""
    bad_words: list[list[int]]
    """In tokens"""
    min_tokens: int
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
    constraint: Constraint | None
    """Write-only: start state of the grammar that the answer keeps to; the request takes a clone"""
    n: int
    """Sequences of the one prompt, 1 … 128; they share its KV blocks"""
    timeout: float
    """Seconds from submit until the request ends with what it has; 0 = none"""
    cache_salt: str
    """Prefixes are shared among requests of an equal salt only"""
    retention_priority: int
    """0 … 100; cached prefixes of a higher one are evicted later"""
    adapter: int
    """Id given to load_adapter; 0 = the bare model"""
    prompt_logprobs: int
    """-1 = none; n ≥ 0: log-probability of each prompt token from the second on and of the n most likely ones"""
    pooling: str
    """none | last | mean: with the latter two the request ends with its prompt and answers with an embedding"""
    def __init__(self) -> None: ...

class Constraint:
    """A state of a compiled grammar. Threads share it as they share a list: one at a time changes it."""

    def clone(self) -> Constraint: ...
    def mask(self, vocab_size: int) -> npt.NDArray[np.uint32]:
        """What may come next, end tokens included: bit t % 32 of word t / 32, `[⌈vocab_size / 32⌉]`. Raises
        InvalidRequest where nothing may."""

    def accept(self, token: int) -> None:
        """Advances by an allowed token. Raises Internal for others, and the state is of no use any more."""

    def take_forced(self, limit: int) -> list[int]:
        """Tokens that must come next, at most `limit`; the state is advanced past them."""

    @property
    def finished(self) -> bool:
        """Nothing may follow, not even an end token."""

class GrammarCompiler:
    """Compiles grammars for one vocabulary, through the C interface of llguidance. Thread-safe; releases the GIL."""

    def __init__(
        self,
        library_path: str,
        tokens: Sequence[bytes],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        max_compile_seconds: float = 10.0,
    ) -> None:
        """`tokens`: bytes by id, empty for tokens that no text is made of. Raises EngineIncompatible for a library that
        is no llguidance of a supported version."""

    def compile(self, kind: str, text: str, param: str) -> Constraint:
        """The start state. `kind`: json_schema | regex | lark; `param` names the request's field in errors.

        Raises InvalidRequest where the grammar is malformed, too large or cannot be met, Overloaded where too many
        others take too long."""

    @property
    def library_version(self) -> str: ...

class TokenLogprobs:
    token_id: int
    logprob: float
    top: list[tuple[int, float]]

class SequenceTimings:
    """Seconds from submit."""

    queue_seconds: float
    """Until the prompt began to be computed"""
    first_token_seconds: float
    total_seconds: float

class Response:
    """News of one sequence of a request after a step; its last one has finish_reason set. An error ends all sequences
    of a request with one response."""

    request_id: int
    sequence_index: int
    """0 … n−1"""
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    logits: list[npt.NDArray[np.float32]]
    embedding: npt.NDArray[np.float32] | None
    """[hidden_size], in the last response of a request with pooling"""
    finish_reason: str | None
    """None while running; stop | length | timeout | cancelled | error"""
    stop_token_id: int | None
    """The EOS or stop token that ended the request; it is in token_ids"""
    error_kind: str | None
    error_message: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs]
    """In the first response of sequence 0; those of the others may come earlier"""
    timings: SequenceTimings | None
    """In the last response of a sequence"""
    num_preemptions: int
    num_draft_tokens: int
    """Tokens that speculation proposed for this sequence so far"""
    num_accepted_tokens: int

class ManagerConfig:
    num_threads: int
    device: int
    devices: Sequence[int]
    deterministic: bool
    cublaslt: str
    tactics: str
    """0 = default_num_threads()"""
    num_kv_blocks: int
    """0 = enough for max_batch_size sequences of max_seq_len, at most a quarter of the free memory, nine
    tenths of a GPU's"""
    max_batch_size: int
    """0 = the engine's"""
    max_num_tokens: int
    """0 = the engine's; tokens per step over all sequences"""
    max_chunk_tokens: int
    """0 = no limit below max_num_tokens; largest context chunk of one request in one step"""
    max_queue_size: int
    max_queued_tokens: int
    """0 = no limit; most prompt tokens of all waiting requests together"""
    eos_token_ids: list[int]
    kv_cache_bytes: int
    """At most one of this, the next two and num_kv_blocks is not 0"""
    kv_cache_tokens: int
    kv_cache_fraction: float
    """Of the free memory"""
    kv_host_bytes: int
    capacity_policy: str
    """max_utilization | guaranteed_no_evict"""
    queue_policy: str
    """priority | fcfs | longest_prefix"""
    max_wait_steps: int
    enable_prefix_caching: bool
    max_kv_events: int
    """Kept until read; 0 = none are made"""
    stuck_step_seconds: float
    """0 = never"""
    speculative: str
    """none | ngram | draft"""
    num_speculative_tokens: int
    ngram_max: int
    ngram_min: int
    draft_rank_file: str
    """Of speculative draft; else empty"""
    def __init__(self) -> None: ...

class StepStats:
    """One step."""

    step: int
    latency_seconds: float
    """From its planning to its last response"""
    run_seconds: float
    """Of that, in the runner"""
    scheduled: int
    queued: int
    paused: int
    preempted: int
    context_tokens: int
    generation_tokens: int
    planned_ahead: bool

class KvCacheStats:
    """Counters since the start; a block counts in each KV group."""

    queried_tokens: int
    hit_tokens: int
    stored_blocks: int
    reused_blocks: int
    evicted_blocks: int
    offloaded_blocks: int
    onloaded_blocks: int
    copied_blocks: int

class Stats:
    """Counters since the start, and the state after the latest step; see `aotllm/stats.h`."""

    steps: int
    steps_planned_ahead: int
    steps_queued: int
    queued: int
    running: int
    finished: int
    timed_out: int
    failed: int
    context_tokens: int
    generated_tokens: int
    forced_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    stuck_steps: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    host_blocks_used: int
    cache: KvCacheStats
    last_step: StepStats
    hit_rate: float

class KvGroupMemory:
    window: int
    """0 = full attention"""
    bytes_per_block: int
    device_blocks: int
    host_blocks: int

class KvMemory:
    """What the KV memory buys."""

    groups: list[KvGroupMemory]
    tokens_per_block: int
    max_seq_len: int
    device_bytes: int
    host_bytes: int
    tokens: int
    """Tokens that fit in the device's blocks"""
    sequences_at_max_len: int

class KvEvent:
    """News of the prefix cache; `id` counts from 1, a gap tells that events were dropped."""

    kind: str
    """stored | removed | moved"""
    id: int
    key: int
    parent_key: int
    group: int
    tier: str
    """device | host"""
    adapter: int
    tokens: list[int]
    """Of kind stored only: [tokens_per_block]"""

class GptManager:
    """The in-flight-batching loop on a C++ thread of its own. All methods are thread-safe and release the GIL."""

    def __init__(self, rank_file: str, config: ManagerConfig) -> None: ...
    @staticmethod
    def with_oracle_runner(
        config: ManagerConfig,
        *,
        vocab_size: int,
        max_seq_len: int,
        max_batch_size: int,
        max_num_tokens: int,
        tokens_per_block: int,
        hidden_size: int,
        kv_windows: Sequence[int],
        kv_bytes_per_token: int,
        spoken_tokens: Sequence[int],
        step_seconds: float,
    ) -> GptManager:
        """A manager over a model that computes nothing, see `runner/oracle_runner.h`: its next token is a function of
        the last one, its position and the adapter. No tokens in `spoken_tokens`: all but the end tokens of `config`.
        Raises InvalidRequest for a size out of range."""

    def submit(self, request: Request) -> int:
        """Request id. Raises InvalidRequest, ContextTooLong (can never fit), Overloaded (queue full), Cancelled
        (shut down)."""

    def cancel(self, request_id: int, sequence_index: int = -1) -> None:
        """Ends one sequence, or all (-1); no-op for a finished or unknown one. Each last response says cancelled."""

    def poll(self, timeout: float) -> list[Response]:
        """All responses that are ready, of any request, in order; waits up to `timeout` seconds for the first one.
        Empty on time-out, and at once after shutdown when nothing is left."""

    def stats(self) -> Stats: ...
    def memory(self) -> KvMemory: ...
    def kv_events(self) -> list[KvEvent]:
        """Those since the last call, in order."""

    def step_stats(self) -> list[StepStats]:
        """The steps since the last call, at most the latest 1024."""

    def clear_prefix_cache(self) -> None:
        """Forgets all cached prefixes before the next step."""

    def load_adapter(self, adapter_id: int, adapter: Adapter) -> None:
        """Makes an adapter available to requests; ids are above 0 and never used again. Raises InvalidRequest where it
        does not fit the model."""

    def unload_adapter(self, adapter_id: int) -> None:
        """No request may name it any more; it is freed once none uses it. No-op for an unknown id."""

    def shutdown(self, drain: bool = False) -> None:
        """Idempotent. drain=True lets running and queued requests finish; else they end as cancelled."""
    @property
    def tactics_note(self) -> str:
        """Why the engine's tactics.json is left aside; empty = it is not, or there is none"""

    @property
    def max_seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
