"""`EmbeddingOutput`: a prompt as a vector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aotllm.errors import Cancelled, TimedOut
from aotllm.request import RequestOutput


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: Any = field(compare=False)
    """float32 `[hidden_size]` array"""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache; none with pooling mean"""

    @classmethod
    def from_result(cls, result: RequestOutput, normalize: bool) -> EmbeddingOutput:
        """Of a finished request with pooling.

        Args:
            result: of the request.
            normalize: divide by the Euclidean length.

        Raises:
            TimedOut, Cancelled: the request ended before its prompt was computed.
        """
        if result.embedding is None:
            kind = TimedOut if result.finish_reason == "timeout" else Cancelled
            raise kind(f"request {result.request_id} ended ({result.finish_reason}) before its prompt was computed")
        embedding = normalized(result.embedding) if normalize else result.embedding
        return cls(embedding, result.num_prompt_tokens, result.num_cached_tokens)


def normalized(vector: Any) -> Any:
    """A float32 array divided by its Euclidean length; zeros stay zeros."""
    import numpy as np  # here: an engine that generates text needs none of it

    wide = np.asarray(vector, np.float64)
    length = float(np.sqrt(np.dot(wide, wide)))
    return (wide / length if length > 0 else wide).astype(np.float32)
