"""`ExecutorConfig`: what is chosen when an engine is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aotllm.errors import InvalidRequest
from aotllm.kv_memory import KvMemorySize, parse_bytes, parse_kv_memory
from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter
from aotllm.request import MAX_TIMEOUT

_INT_MAX = 2**31 - 1
CAPACITY_POLICIES = ("max_utilization", "guaranteed_no_evict")
QUEUE_POLICIES = ("priority", "fcfs", "longest_prefix")


@documented
@dataclass(frozen=True)
class ExecutorConfig:
    """Sizes, within those that the engine was built for, and policies.

    Each field is declared here and nowhere else: the flags of `aotllm run` and `aotllm serve` are generated from it.

    Raises:
        InvalidRequest: a value is out of range, or two contradict each other; `param` names it.
    """

    num_threads: int = parameter(
        0, ParameterSpec("Threads of the CPU target; 0 = the CPUs that this process may use.", int, low=0, high=4096)
    )
    device: int = parameter(
        0,
        ParameterSpec(
            "GPU of the cuda target, by its number among the visible ones; of several ranks (--tp), that of the "
            "first, and the others take those that follow.",
            int,
            low=0,
            high=1023,
        ),
    )
    devices: str | None = parameter(
        None,
        ParameterSpec(
            "GPUs of the ranks of an engine that was built with --tp or --pp, in order of stages, then ranks, as in "
            "0,1,2,3; one number puts all of them on that GPU. None = by device.",
            str,
            optional=True,
        ),
    )
    deterministic: bool = parameter(
        False,
        ParameterSpec(
            "cuda target: an answer's bits do not depend on what else runs; slower. Always so on the cpu target.", bool
        ),
    )
    num_kv_blocks: int = parameter(
        0,
        ParameterSpec(
            "Blocks of the KV cache; 0 = enough for a full batch of full length, at most a quarter of free memory, "
            "nine tenths of a GPU's.",
            int,
            low=0,
            high=_INT_MAX,
        ),
    )
    max_queue_size: int = parameter(
        1024,
        ParameterSpec("Most requests that wait; one more is refused as overloaded.", int, low=0, high=_INT_MAX),
    )
    max_batch_size: int = parameter(
        0, ParameterSpec("Most requests that run at a time; 0 = the engine's.", int, low=0, high=_INT_MAX)
    )
    max_num_tokens: int = parameter(
        0,
        ParameterSpec("Most tokens of one step, all requests together; 0 = the engine's.", int, low=0, high=_INT_MAX),
    )
    max_chunk_tokens: int = parameter(
        0, ParameterSpec("Most prompt tokens of one request in one step; 0 = no limit.", int, low=0, high=_INT_MAX)
    )
    kv_cache_memory: str | None = parameter(
        None,
        ParameterSpec(
            "Memory of the KV cache: bytes (4000000000, 512MB, 1.5GiB), tokens (100000tokens), or a fraction of the "
            "free memory (0.5); a whole number without unit is bytes, one with a decimal point a fraction. None = by "
            "num_kv_blocks.",
            str,
            optional=True,
        ),
    )
    kv_host_memory: str = parameter(
        "0",
        ParameterSpec(
            "Memory of the KV cache's second tier, in bytes (2GiB): it keeps prefixes that the first has no room for.",
            str,
        ),
    )
    capacity_policy: str = parameter(
        "max_utilization",
        ParameterSpec(
            "max_utilization admits a request as soon as its prompt fits and may have to preempt later; "
            "guaranteed_no_evict when its whole answer fits.",
            str,
            choices=CAPACITY_POLICIES,
        ),
    )
    queue_policy: str = parameter(
        "priority",
        ParameterSpec(
            "Who is admitted first: priority, then age; fcfs, the oldest; longest_prefix, who finds most of its prompt "
            "in the cache.",
            str,
            choices=QUEUE_POLICIES,
        ),
    )
    max_wait_steps: int = parameter(
        2000,
        ParameterSpec(
            "Steps after which a waiting request goes before any other, whatever the policy, so that nobody starves.",
            int,
            low=1,
            high=_INT_MAX,
        ),
    )
    max_queued_tokens: int = parameter(
        0,
        ParameterSpec(
            "Most prompt tokens of all waiting requests together; a request beyond is refused as overloaded; 0 = no "
            "limit.",
            int,
            low=0,
            high=2**63 - 1,
        ),
    )
    prefix_caching: bool = parameter(
        True,
        ParameterSpec("Keep the keys and values of prompts and answers for later requests that begin alike.", bool),
    )
    max_kv_events: int = parameter(
        0,
        ParameterSpec(
            "Events of the prefix cache that are kept until they are read; 0 = none.", int, low=0, high=_INT_MAX
        ),
    )
    stuck_step_seconds: float = parameter(
        0.0,
        ParameterSpec(
            "A step that takes longer means that the runtime hangs: it is no longer alive; 0 = never.",
            float,
            low=0.0,
            high=MAX_TIMEOUT,
        ),
    )
    speculative: str = parameter(
        "none",
        ParameterSpec(
            "Guess several tokens and check them in one step, with the same answers: none; ngram, by what the text has "
            "said before; or the folder of a small engine with the same tokenizer.",
            str,
        ),
    )
    num_speculative_tokens: int = parameter(
        4, ParameterSpec("Tokens to guess at a time, with speculative.", int, low=1, high=64)
    )
    ngram_max: int = parameter(
        4,
        ParameterSpec(
            "Longest piece of text that is looked up, in tokens, with speculative ngram.", int, low=1, high=64
        ),
    )
    ngram_min: int = parameter(
        3,
        ParameterSpec(
            "Shortest piece of text that is looked up, at most ngram_max: shorter ones guess more and worse.",
            int,
            low=1,
            high=64,
        ),
    )
    timeout: float = parameter(
        0.0,
        ParameterSpec(
            "Seconds after which a request that sets no time of its own ends with what it has; 0 = never.",
            float,
            low=0.0,
            high=MAX_TIMEOUT,
        ),
    )

    def __post_init__(self) -> None:
        check_parameters(self)
        if self.kv_memory_size != KvMemorySize() and self.num_kv_blocks:
            raise InvalidRequest(
                "kv_cache_memory and num_kv_blocks say the same thing; give one of them", "num_kv_blocks"
            )
        parse_bytes(self.kv_host_memory, "kv_host_memory")
        if self.devices is not None and not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", self.devices):
            raise InvalidRequest(
                f"devices must be numbers with commas between, as in 0,1, got {self.devices}", "devices"
            )
        if self.ngram_min > self.ngram_max:
            raise InvalidRequest(
                f"ngram_min must be at most ngram_max, which is {self.ngram_max}, got {self.ngram_min}", "ngram_min"
            )

    @property
    def device_numbers(self) -> tuple[int, ...]:
        """`devices` as numbers; empty where it was not given."""
        return () if self.devices is None else tuple(int(number) for number in self.devices.split(","))

    @property
    def kv_memory_size(self) -> KvMemorySize:
        """`kv_cache_memory` as a number; all zeros where it was not given."""
        return KvMemorySize() if self.kv_cache_memory is None else parse_kv_memory(self.kv_cache_memory)

    @property
    def kv_host_bytes(self) -> int:
        """`kv_host_memory` as a number."""
        return parse_bytes(self.kv_host_memory, "kv_host_memory")

    @property
    def speculation(self) -> str:
        """none | ngram | draft."""
        return self.speculative if self.speculative in ("none", "ngram") else "draft"

    @property
    def draft_engine(self) -> str | None:
        """Folder of the engine that guesses; None unless `speculation` is draft."""
        return self.speculative if self.speculation == "draft" else None
