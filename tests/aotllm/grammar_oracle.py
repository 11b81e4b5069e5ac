"""Compiled grammars over a vocabulary of single bytes, where a mask shows exactly what a grammar means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aotllm.grammars import Grammars
from aotllm.structured_outputs import StructuredOutputs
from tests.aotllm.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

if TYPE_CHECKING:
    from aotllm._runtime import Constraint


def byte_grammars() -> Grammars:
    """A compiler for `byte_tokenizer`."""
    return Grammars(byte_tokenizer(), [EOS], VOCAB_SIZE)


def allowed(state: Constraint, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Ids that may come next."""
    bits = np.unpackbits(state.mask(vocab_size).view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def accepts(start: Constraint, text: str) -> bool:
    """Whether the grammar takes all of `text`, byte by byte, and may end after it."""
    state = start.clone()
    for byte in text.encode():
        if state.finished or byte not in allowed(state):
            return False
        state.accept(byte)
    return state.finished or EOS in allowed(state)


def form(**given: object) -> StructuredOutputs:
    """`StructuredOutputs` of values that may have any type."""
    return StructuredOutputs(**given)  # type: ignore[arg-type]
