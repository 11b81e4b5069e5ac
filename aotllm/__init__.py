"""aotllm: an ahead-of-time compiler for large language models and an in-flight-batching runtime.

    from aotllm import Executor, Request, SamplingParams

The names below are imported when first used, so that `import aotllm` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from aotllm.beam_search import BeamSearchParams
    from aotllm.embedding import EmbeddingOutput
    from aotllm.engines import Engine, open_engine
    from aotllm.errors import AotllmError
    from aotllm.executor import Executor
    from aotllm.executor_config import ExecutorConfig
    from aotllm.kv_memory import KvMemory
    from aotllm.request import Request, RequestOutput, SequenceOutput, Timings, TokenLogprob, TokenOutput
    from aotllm.request_handle import RequestHandle
    from aotllm.sampling_params import SamplingParams
    from aotllm.stats import ExecutorStats
    from aotllm.structured_outputs import StructuredOutputs

_HOME = {
    "AotllmError": "aotllm.errors",
    "BeamSearchParams": "aotllm.beam_search",
    "EmbeddingOutput": "aotllm.embedding",
    "Engine": "aotllm.engines",
    "Executor": "aotllm.executor",
    "ExecutorConfig": "aotllm.executor_config",
    "ExecutorStats": "aotllm.stats",
    "KvMemory": "aotllm.kv_memory",
    "Request": "aotllm.request",
    "RequestHandle": "aotllm.request_handle",
    "RequestOutput": "aotllm.request",
    "SamplingParams": "aotllm.sampling_params",
    "SequenceOutput": "aotllm.request",
    "StructuredOutputs": "aotllm.structured_outputs",
    "Timings": "aotllm.request",
    "TokenLogprob": "aotllm.request",
    "TokenOutput": "aotllm.request",
    "open_engine": "aotllm.engines",
}

__all__ = [
    "AotllmError",
    "BeamSearchParams",
    "EmbeddingOutput",
    "Engine",
    "Executor",
    "ExecutorConfig",
    "ExecutorStats",
    "KvMemory",
    "Request",
    "RequestHandle",
    "RequestOutput",
    "SamplingParams",
    "SequenceOutput",
    "StructuredOutputs",
    "Timings",
    "TokenLogprob",
    "TokenOutput",
    "__version__",
    "open_engine",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'aotllm' has no attribute {name!r}")
