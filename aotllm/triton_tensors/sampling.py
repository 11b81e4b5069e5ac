"""`sampling_of`: the options of a prompt as `SamplingParams`.

What a client leaves out has the value that it has in TensorRT-LLM, whose clients these are, and not that of the
checkpoint's generation_config.json: the most likely token unless top_k or top_p is given, no penalties, seed 0
(TensorRT-LLM, docs/source/advanced/gpt-runtime.md, "Sampling Parameters").
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aotllm.errors import InvalidRequest
from aotllm.parameters import parameters
from aotllm.sampling_params import SamplingParams
from aotllm.triton_tensors.inputs import Options

if TYPE_CHECKING:
    from collections.abc import Collection

    from aotllm.tokenization import Tokenizer

_SAMPLING = frozenset(name for name, _, _ in parameters(SamplingParams))
_SEED = 0


def sampling_of(
    row: Options, n: int, logprobs: bool, tokenizer: Tokenizer, end_token_ids: Collection[int]
) -> SamplingParams:
    """How the answers to a prompt are drawn.

    Args:
        row: of the prompt.
        n: answers.
        logprobs: they are to be reported.
        tokenizer: of the engine, for words that are to be token ids, and the other way round.
        end_token_ids: of the engine.

    Raises:
        InvalidRequest: a value is out of range.
    """
    given = {"seed": _SEED} | {name: value for name, value in row.items() if name in _SAMPLING} | {"n": n}
    if logprobs:
        given["logprobs"] = 0
    for name in ("stop", "bad_words"):
        if name in given:
            given[name] = [word for word in given[name] if word]  # "" is how clients of these models say none
    bias = _bias(row, tokenizer)
    if bias:
        given["logit_bias"] = bias
    for word in row.get("stop_words_list", ()):
        _add_stop_word(given, word, tokenizer)
    for word in row.get("bad_words_list", ()):
        given["bad_words"] = [*given.get("bad_words", ()), _bad_word(word, tokenizer)]
    end_id = row.get("end_id")
    if end_id is not None and end_id not in end_token_ids:
        # Another end token takes the place of the model's own; −1 stands for none.
        given["ignore_eos"] = True
        if end_id != -1:
            given["stop_token_ids"] = [*given.get("stop_token_ids", ()), end_id]
    draws = given.get("top_k", 0) > 0 or given.get("top_p", 0) != 0
    if given.get("top_p") == 0:  # off
        given["top_p"] = 1.0
    sampling = SamplingParams(**given)
    return sampling if draws else sampling.replace(temperature=0.0)


def _bias(row: Options, tokenizer: Tokenizer) -> dict[int, float]:
    """Bias by token id, of all inputs that have some. A word's weight is added to each of its tokens."""
    given = row.get("logit_bias", {})
    bias = dict(SamplingParams(logit_bias=_object(given) if isinstance(given, str) else given).logit_bias)
    for token_id, weight in enumerate(row.get("embedding_bias", ())):
        if weight != 0:
            bias[token_id] = bias.get(token_id, 0.0) + weight
    words, weights = row.get("embedding_bias_words", []), row.get("embedding_bias_weights", [])
    if len(words) != len(weights):
        raise InvalidRequest(
            f"embedding_bias_words has {len(words)} words, embedding_bias_weights {len(weights)} weights; "
            "give one weight per word",
            "embedding_bias_weights",
        )
    for word, weight in zip(words, weights, strict=True):
        if not word:
            continue
        for token_id in tokenizer.encode(word, add_special_tokens=False, param="embedding_bias_words"):
            bias[token_id] = bias.get(token_id, 0.0) + weight
    return bias


def _object(text: str) -> Any:
    try:
        bias = json.loads(text)
    except (ValueError, RecursionError):
        bias = None
    if not isinstance(bias, dict):
        raise InvalidRequest(
            f"logit_bias must be a JSON object from token id to number, got {text!r:.80}", "logit_bias"
        )
    return bias


def _add_stop_word(given: dict[str, Any], word: list[int], tokenizer: Tokenizer) -> None:
    """A token ends the answer as such, several tokens by the text that they stand for."""
    if len(word) == 1:
        given["stop_token_ids"] = [*given.get("stop_token_ids", ()), word[0]]
    else:
        given["stop"] = [*given.get("stop", ()), _text(word, tokenizer, "stop_words_list")]


def _bad_word(ids: list[int], tokenizer: Tokenizer) -> str:
    word = _text(ids, tokenizer, "bad_words_list")
    if list(tokenizer.encode(word, add_special_tokens=False)) != ids:
        raise InvalidRequest(
            f"bad_words_list has {ids!r:.80}, which is not how the tokenizer splits a text; send bad_words as text",
            "bad_words_list",
        )
    return word


def _text(ids: list[int], tokenizer: Tokenizer, name: str) -> str:
    text = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    if not text or "\ufffd" in text:
        raise InvalidRequest(f"{name} has {ids!r:.80}, which is no text; give whole characters", name)
    return text
