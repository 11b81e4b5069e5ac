"""English text that every CPython carries, and what a change of perplexity over it is known to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aotllm.engines import Engine
from tests.integration.test_quality import log_softmax

CHUNK_TOKENS = 512
FIRST_SCORED = 64
"""Tokens of a chunk that are context only"""
CHUNKS = 24


def prose_chunks(engine: Engine, count: int = CHUNKS) -> list[list[int]]:
    """Chunks of 512 tokens from all over Python's language reference, as `help()` shows it."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = engine.tokenizer().encode(text, add_special_tokens=False)
    starts = np.linspace(0, len(ids) - CHUNK_TOKENS, count).astype(int)
    return [ids[start : start + CHUNK_TOKENS] for start in starts]


def token_losses(logits: np.ndarray, chunk: list[int]) -> np.ndarray:
    """Negative log-likelihoods of a chunk from FIRST_SCORED on, by the logits `[512, vocab]` at each of its tokens."""
    scores = log_softmax(logits[FIRST_SCORED - 1 : -1])
    scored: np.ndarray = -scores[np.arange(len(scores)), chunk[FIRST_SCORED:]]
    return scored


@dataclass(frozen=True)
class Change:
    """Of perplexity, from one run over some chunks to another over the same."""

    change: float
    """0.01 = 1 % more"""
    error: float
    """Standard error of `change`, from how it differs between chunks"""

    def __str__(self) -> str:
        return f"{self.change:+.2%} ± {self.error:.2%}"


def compare(before: np.ndarray, after: np.ndarray) -> Change:
    """Of negative log-likelihoods `[chunks, tokens]`: token by token, which most of a text's scatter has no part in."""
    by_chunk = (after - before).mean(axis=1)
    return Change(float(np.expm1(by_chunk.mean())), float(by_chunk.std(ddof=1) / len(by_chunk) ** 0.5))
