"""`open_draft_engine`: the engine that guesses in speculative decoding, checked against the one it guesses for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aotllm.errors import EngineIncompatible

if TYPE_CHECKING:
    from aotllm.engines import Engine
    from aotllm.tokenization import Tokenizer


def open_draft_engine(folder: str | Path, target: Engine, tokenizer: Tokenizer, verify: bool) -> Engine:
    """Open a draft engine.

    Args:
        folder: its bundle.
        target, tokenizer: the engine that it guesses for.
        verify: as of `aotllm.open_engine`.

    Raises:
        EngineError: the bundle is missing or damaged.
        EngineIncompatible: its tokens are not the target's, so that its guesses would mean something else.
    """
    from aotllm.engines import open_engine

    draft = open_engine(folder, verify=verify)
    difference = _difference(draft, draft.tokenizer(), target, tokenizer)
    if difference is not None:
        raise EngineIncompatible(
            f"{folder}: cannot draft for {target.path}: {difference}; a draft engine needs the same tokenizer: "
            "build one from a smaller model of the same family, or use speculative ngram"
        )
    return draft


def _difference(draft: Engine, draft_tokenizer: Tokenizer, target: Engine, tokenizer: Tokenizer) -> str | None:
    got, needed = draft_tokenizer.vocab_size, tokenizer.vocab_size
    if got != needed:
        return f"its tokenizer has {got} tokens, the target's {needed}"
    for token_id in range(needed):
        ours, theirs = draft_tokenizer.token_bytes(token_id), tokenizer.token_bytes(token_id)
        if ours != theirs:
            return f"its token {token_id} is {ours!r:.40}, the target's {theirs!r:.40}"
    if set(draft.manifest.eos_token_ids) != set(target.manifest.eos_token_ids):
        return (
            f"its end tokens are {sorted(draft.manifest.eos_token_ids)}, the target's "
            f"{sorted(target.manifest.eos_token_ids)}"
        )
    return None
