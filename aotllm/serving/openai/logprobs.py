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


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offset: int, as_ids: bool = False
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of completions.

    Args:
        tokenizer: for the text of tokens.
        logprobs: of consecutive tokens.
        offset: where the text of the first one starts, in characters.
        as_ids: tokens are shown as `token_id:ID`, since many have no text of their own.
    """
    tokens = [token_text(tokenizer, entry.token_id) for entry in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "tokens": [_shown(tokenizer, entry.token_id, as_ids) for entry in logprobs],
        # The drawn token is always among them, whether or not it is one of the most likely.
        "top_logprobs": [
            {
                _shown(tokenizer, token_id, as_ids): _finite(logprob)
                for token_id, logprob in [(entry.token_id, entry.logprob), *entry.top]
            }
            for entry in logprobs
        ],
    }


def echoed_logprobs(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    length: int,
    as_ids: bool = False,
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of completions for the prompt in front of an answer; the first token has none.

    Args:
        tokenizer: for the text of tokens.
        prompt_token_ids: the prompt.
        logprobs: of its tokens from the second on.
        length: characters of the prompt's text, where the answer begins. Offsets are counted back from there, since
            tokens that the tokenizer has put in front (BOS) are not part of the text.
        as_ids: as in `completion_logprobs`.
    """
    first = token_text(tokenizer, prompt_token_ids[0])
    texts = [first, *(token_text(tokenizer, entry.token_id) for entry in logprobs)]
    scored = completion_logprobs(tokenizer, logprobs, length - sum(map(len, texts[1:])), as_ids)
    offsets = [length - sum(map(len, texts)), *scored["text_offset"]]
    return {
        "text_offset": [max(0, offset) for offset in offsets],
        "token_logprobs": [None, *scored["token_logprobs"]],
        "tokens": [_shown(tokenizer, prompt_token_ids[0], as_ids), *scored["tokens"]],
        "top_logprobs": [None, *scored["top_logprobs"]],
    }


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM has it: per prompt token its own log-probability and those of the most likely ones, by
    id; null for the first token. `rank` counts from 1, and is null for a token that is not among the most likely."""
    scored: list[dict[str, Any] | None] = [None]
    for entry in logprobs:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        scored.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": ranks.get(token_id),
                    "decoded_token": token_text(tokenizer, token_id),
                }
                for token_id, logprob in dict([(entry.token_id, entry.logprob), *entry.top]).items()
            }
        )
    return scored


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.token_bytes(token_id)
    return {"token": token.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(token)}


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Text of one token; bytes that are no whole character become U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _shown(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else token_text(tokenizer, token_id)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
