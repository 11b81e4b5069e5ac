"""The tokenizer of a GGUF file: metadata under `tokenizer.*` → `TokenizerAssets`.

Keys and defaults: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's vocabulary loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotllm.builder.checkpoints.base import TokenizerAssets
from aotllm.builder.checkpoints.byte_level_tokenizer import build_byte_level_tokenizer, find_pre_tokenizer
from aotllm.builder.checkpoints.sentencepiece_tokenizer import (
    SPACE,
    Piece,
    PieceType,
    SentencePieceModel,
    build_sentencepiece_tokenizer,
    is_byte_piece,
)
from aotllm.builder.checkpoints.special_tokenizer_parts import SpecialTokens
from aotllm.errors import CheckpointError, UnsupportedModel

_SPM_DEFAULT_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Llama's ids, for files that leave the keys out"""

_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<turn|>"),
    *("<|endoftext|>", "<|end_of_text|>"),
)
"""Control tokens that end a turn or a text. A file names one EOS, often not the one that ends a turn."""

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TokenizerAssets:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: GGUF key → value (str, int, float, bool, list or numpy array).

    Raises:
        UnsupportedModel: a kind of tokenizer, or a pre-tokenizer, that is not implemented.
        CheckpointError: keys are missing, have the wrong type or contradict one another.
    """
    model = _get(metadata, "tokenizer.ggml.model", str, required=True)
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"GGUF metadata: tokenizer.ggml.model {model!r} is not supported; supported are gpt2 (byte-level BPE) and "
            "llama (SentencePiece BPE)"
        )
    vocab = _read_vocabulary(metadata)
    if model == "gpt2":
        special, text = _byte_level(metadata, vocab)
    else:
        special, text = _sentencepiece(metadata, vocab)
    template = _get(metadata, "tokenizer.chat_template", str)
    generation: dict[str, Any] = {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}
    if eos_ids := eos_token_ids(metadata):
        generation["eos_token_id"] = list(eos_ids)
    return TokenizerAssets(
        tokenizer_json=text,
        chat_template=template or None,
        bos_token=special.bos,
        eos_token=special.eos,
        add_bos=special.add_bos,
        generation_config=generation,
    )


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation: EOS, end of turn and end of message, by key and, for control tokens, by name.

    Raises CheckpointError where the vocabulary is missing or malformed, or an id is outside of it.
    """
    vocab = _read_vocabulary(metadata)
    spm = metadata.get("tokenizer.ggml.model") == "llama"
    ids = [
        _token_id(metadata, "eos_token_id", vocab, spm),
        _token_id(metadata, "eot_token_id", vocab, spm),
        _token_id(metadata, "eom_token_id", vocab, spm),
    ]
    names = set(_ENDS)
    ids += [i for i, t in enumerate(vocab.tokens) if t in names and vocab.types[i] == PieceType.CONTROL]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: list[PieceType]
    """One per token"""

    def of_type(self, *types: PieceType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def text(self, index: int | None) -> str | None:
        return None if index is None else self.tokens[index]


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    raw = _array(metadata, "tokenizer.ggml.tokens")
    if raw is None or not raw:
        raise CheckpointError("GGUF metadata: tokenizer.ggml.tokens is missing or empty; the file has no vocabulary")
    # Some files pad with empty strings, which could not be told apart.
    tokens = [_text(token, "tokenizer.ggml.tokens", i) or f"[EMPTY_{i}]" for i, token in enumerate(raw)]
    raw_types = _array(metadata, "tokenizer.ggml.token_type")
    if raw_types is None:
        return _Vocabulary(tokens, [PieceType.NORMAL] * len(tokens))
    if len(raw_types) != len(tokens):
        raise CheckpointError(
            f"GGUF metadata: tokenizer.ggml.token_type has {len(raw_types)} entries for {len(tokens)} tokens"
        )
    known = {int(kind): kind for kind in PieceType}
    known[0] = PieceType.NORMAL  # "undefined"
    try:
        return _Vocabulary(tokens, [known[kind] for kind in raw_types])
    except (KeyError, TypeError):
        raise CheckpointError("GGUF metadata: tokenizer.ggml.token_type holds values that are not in 0..6") from None


def _byte_level(metadata: Mapping[str, Any], vocab: _Vocabulary) -> tuple[SpecialTokens, str]:
    name = _get(metadata, "tokenizer.ggml.pre", str) or "default"
    pre = find_pre_tokenizer(name, "GGUF metadata")
    special = _special(metadata, vocab, add_bos=pre.add_bos, spm=False)
    special.control = vocab.of_type(PieceType.CONTROL, PieceType.UNKNOWN)
    special.user_defined = vocab.of_type(PieceType.USER_DEFINED)
    raw_merges = _array(metadata, "tokenizer.ggml.merges")
    if raw_merges is None:
        raise CheckpointError("GGUF metadata: tokenizer.ggml.merges is missing; a gpt2 tokenizer needs it")
    merges = []
    for rank, raw in enumerate(raw_merges):
        # A part may itself start with a space in files that were not written in the byte alphabet.
        left, space, right = _text(raw, "tokenizer.ggml.merges", rank).partition(" ")
        if not (left and space and right):
            raise CheckpointError(f"GGUF metadata: merge {rank} is {raw!r}, not two tokens with a space between")
        merges.append((left, right))
    return special, build_byte_level_tokenizer(vocab.tokens, merges, pre, special, where="GGUF metadata")


def _sentencepiece(metadata: Mapping[str, Any], vocab: _Vocabulary) -> tuple[SpecialTokens, str]:
    scores = _array(metadata, "tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocab.tokens):
        count = "none" if scores is None else len(scores)
        raise CheckpointError(
            f"GGUF metadata: tokenizer.ggml.scores has {count} entries for {len(vocab.tokens)} tokens; "
            "a llama tokenizer needs one per token"
        )
    if not all(isinstance(s, (int, float)) and s == s for s in scores):
        raise CheckpointError("GGUF metadata: tokenizer.ggml.scores holds values that are not numbers")
    pieces = [
        # Converters write user-defined tokens with real spaces, SentencePiece with its own.
        Piece(token.replace(" ", SPACE) if kind == PieceType.USER_DEFINED else token, float(score), kind)
        for token, score, kind in zip(vocab.tokens, scores, vocab.types, strict=True)
    ]
    for index, piece in enumerate(pieces):
        if piece.type == PieceType.BYTE and not is_byte_piece(piece.text):
            raise CheckpointError(f"GGUF metadata: byte token {index} is {piece.text!r}, not of the form <0x0A>")
    model = SentencePieceModel(
        pieces=pieces,
        unk_id=_token_id(metadata, "unknown_token_id", vocab, spm=True),
        add_dummy_prefix=_flag(metadata, "tokenizer.ggml.add_space_prefix", True),
        remove_extra_whitespaces=_flag(metadata, "tokenizer.ggml.remove_extra_whitespaces", False),
    )
    special = _special(metadata, vocab, add_bos=True, spm=True)
    return special, build_sentencepiece_tokenizer(model, special, where="GGUF metadata")


def _special(metadata: Mapping[str, Any], vocab: _Vocabulary, *, add_bos: bool, spm: bool) -> SpecialTokens:
    bos = vocab.text(_token_id(metadata, "bos_token_id", vocab, spm))
    eos = vocab.text(_token_id(metadata, "eos_token_id", vocab, spm))
    # A default cannot ask for a token that the file does not name; an explicit flag can, and is then an error.
    return SpecialTokens(
        bos=bos,
        eos=eos,
        add_bos=_flag(metadata, "tokenizer.ggml.add_bos_token", add_bos and bos is not None),
        add_eos=_flag(metadata, "tokenizer.ggml.add_eos_token", False),
    )


def _token_id(metadata: Mapping[str, Any], name: str, vocab: _Vocabulary, spm: bool) -> int | None:
    key = f"tokenizer.ggml.{name}"
    value = _get(metadata, key, int)
    if value is None:
        default = _SPM_DEFAULT_IDS.get(name) if spm else None
        if default is None or default >= len(vocab.tokens):
            return None
        return default if vocab.types[default] in (PieceType.CONTROL, PieceType.UNKNOWN) else None
    if not 0 <= value < len(vocab.tokens):
        raise CheckpointError(f"GGUF metadata: {key} is {value}, and there are {len(vocab.tokens)} tokens")
    return int(value)


def _get(metadata: Mapping[str, Any], key: str, kind: type, *, required: bool = False) -> Any:
    value = metadata.get(key)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        if required:
            raise CheckpointError(f"GGUF metadata: {key} is missing; the file has no tokenizer")
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CheckpointError(f"GGUF metadata: {key} is of type {type(value).__name__}, not {kind.__name__}")
    return value


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = _get(metadata, key, bool)
    return default if value is None else bool(value)


def _array(metadata: Mapping[str, Any], key: str) -> list[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"GGUF metadata: {key} is of type {type(value).__name__}, not an array")
    return list(value)


def _text(value: Any, key: str, index: int) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"GGUF metadata: entry {index} of {key} is not UTF-8") from None
    if not isinstance(value, str):
        raise CheckpointError(f"GGUF metadata: entry {index} of {key} is of type {type(value).__name__}, not str")
    return value
