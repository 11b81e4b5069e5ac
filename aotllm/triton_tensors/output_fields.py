"""The tensors that models give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from aotllm.triton_tensors.tensors import BYTES, FP32, INT32, INT64, DataType


class OutputField(NamedTuple):
    """One output tensor, without its batch dimension."""

    name: str
    datatype: DataType
    dims: tuple[int, ...] = (1,)


PERF_METRICS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
"""What `return_perf_metrics` asks for"""

_SHARED = [
    OutputField("cum_log_probs", FP32, (-1,)),
    OutputField("output_log_probs", FP32, (-1, -1)),
    OutputField("generation_logits", FP32, (-1, -1, -1)),
    OutputField("batch_index", INT32),
    OutputField("sequence_index", INT32),
    OutputField("kv_cache_alloc_new_blocks", INT32),
    OutputField("kv_cache_reused_blocks", INT32),
    OutputField("kv_cache_alloc_total_blocks", INT32),
    OutputField("arrival_time_ns", INT64),
    OutputField("first_scheduled_time_ns", INT64),
    OutputField("first_token_time_ns", INT64),
    OutputField("last_token_time_ns", INT64),
    OutputField("acceptance_rate", FP32),
    OutputField("total_accepted_draft_tokens", INT32),
    OutputField("total_draft_tokens", INT32),
    OutputField("num_input_tokens", INT32),
    OutputField("num_output_tokens", INT32, (-1,)),
]

TEXT_OUTPUTS: Mapping[str, OutputField] = {f.name: f for f in (OutputField("text_output", BYTES, (-1,)), *_SHARED)}
"""Of models that give text"""
ID_OUTPUTS: Mapping[str, OutputField] = {
    field.name: field
    for field in (OutputField("output_ids", INT32, (-1, -1)), OutputField("sequence_length", INT32, (-1,)), *_SHARED)
}
"""Of models that give token ids"""

ALWAYS = frozenset(("text_output", "output_ids", "sequence_length"))
"""Those that need no asking for"""
INDEXES = frozenset(("batch_index", "sequence_index"))
"""Which prompt, and which of its answers, a response is about"""

FLAGS: Mapping[str, tuple[str, ...]] = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_generation_logits": ("generation_logits",),
    "return_perf_metrics": PERF_METRICS,
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
}
"""Input -> the outputs that it asks for"""
