"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aotllm.request import TokenLogprob

if TYPE_CHECKING:
    from aotllm.tokenization import Tokenizer

_LOWEST = -9999.0  # JSON has no -inf; clients know this value


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in logprobs
        ]
    }


def completion_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of completions.

    Args:
        tokenizer: for the text of tokens.
        logprobs: of consecutive tokens.
        offset: where the text of the first one starts, in characters.
    """
    tokens = [token_text(tokenizer, entry.token_id) for entry in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "tokens": tokens,
        # The drawn token is always among them, whether or not it is one of the most likely.
        "top_logprobs": [
            {
                token_text(tokenizer, token_id): _finite(logprob)
                for token_id, logprob in [(entry.token_id, entry.logprob), *entry.top]
            }
            for entry in logprobs
        ],
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.token_bytes(token_id)
    return {"token": token.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(token)}


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Text of one token; bytes that are no whole character become U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
