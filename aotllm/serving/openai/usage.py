"""Token counts of an answer, as the OpenAI API reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotllm.request import RequestOutput


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """The `usage` object. End tokens count though their text is hidden."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(results: Sequence[RequestOutput]) -> dict[str, Any]:
    """`usage` of finished requests: each prompt counts once, each answer counts, those that best_of left out too."""
    return usage(
        sum(result.num_prompt_tokens for result in results),
        sum(result.num_generated_tokens for result in results),
        sum(result.num_cached_tokens for result in results),
    )
