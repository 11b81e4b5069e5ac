"""SentencePiece vocabularies (BPE and unigram) as `tokenizers.Tokenizer`s that give the same ids.

Semantics follow SentencePiece (Kudo & Richardson 2018, arXiv:1808.06226): text is normalized, spaces become U+2581,
user-defined pieces are cut out whole, and the rest is merged by score (BPE) or segmented by maximum likelihood
(unigram); what no piece covers becomes its UTF-8 bytes where the vocabulary has byte pieces, else the unknown token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE, Unigram

from aotllm.builder.checkpoints.special_tokenizer_parts import SpecialTokens, finish_tokenizer
from aotllm.errors import CheckpointError, UnsupportedModel
from aotllm.tokenization.library_errors import library_errors

SPACE = "\u2581"
"""SentencePiece's visible stand-in for a space"""

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_UNMATCHABLE_PENALTY = 20.0
"""Unigram pieces that must not come out of text get this multiple of the worst score of an ordinary piece."""


class PieceType(IntEnum):
    """Kinds of tokens; SentencePiece's `ModelProto` and GGUF's `tokenizer.ggml.token_type` number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    """`TrainerSpec.model_type`"""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its id is its position."""

    text: str
    """Spaces are U+2581"""
    score: float
    """BPE: higher merges earlier; unigram: log probability"""
    type: PieceType = PieceType.NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """What a SentencePiece model file says, as far as it changes ids."""

    pieces: Sequence[Piece]
    model_type: ModelType = ModelType.BPE
    unk_id: int | None = 0
    add_dummy_prefix: bool = True
    """A text starts with a space that was not there"""
    remove_extra_whitespaces: bool = False
    precompiled_charsmap: bytes = b""
    """Normalization (NFKC and the like) as SentencePiece's compiled trie; empty = none"""


def build_sentencepiece_tokenizer(model: SentencePieceModel, special: SpecialTokens, *, where: str) -> str:
    """Serialize `model` as a `tokenizers.Tokenizer`.

    `special` is completed by the model's own control, unknown and user-defined pieces.

    Raises:
        CheckpointError: pieces repeat, or the unknown token is missing where the model needs one.
        UnsupportedModel: word and character models.
    """
    vocab = _vocabulary(model, where)
    for piece in model.pieces:
        if piece.type in (PieceType.CONTROL, PieceType.UNKNOWN):
            special.control.append(piece.text)
        elif piece.type == PieceType.USER_DEFINED:
            special.user_defined.append(_surface(piece))
    core: BPE | Unigram
    if model.model_type == ModelType.BPE:
        core = _bpe(model, vocab)
    elif model.model_type == ModelType.UNIGRAM:
        core = _unigram(model, where)
    else:
        raise UnsupportedModel(
            f"{where}: SentencePiece model type {model.model_type.name.lower()} is not supported; "
            "supported are bpe and unigram"
        )
    tokenizer = Tokenizer(core)
    steps = _normalizers(model, special.user_defined, where)
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = _decoder(model)
    return finish_tokenizer(tokenizer, special, normalize_user_defined=True, where=where)


def _surface(piece: Piece) -> str:
    """Key of a piece in the vocabulary. User-defined ones keep spaces, as they are matched as added tokens."""
    return piece.text.replace(SPACE, " ") if piece.type == PieceType.USER_DEFINED else piece.text


def _vocabulary(model: SentencePieceModel, where: str) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for index, piece in enumerate(model.pieces):
        other = vocab.setdefault(_surface(piece), index)
        if other != index:
            raise CheckpointError(f"{where}: tokens {other} and {index} are both {piece.text!r}; tokens must be unique")
    return vocab


def _has_bytes(model: SentencePieceModel) -> bool:
    return any(piece.type == PieceType.BYTE for piece in model.pieces)


def _bpe(model: SentencePieceModel, vocab: dict[str, int]) -> BPE:
    unk = model.pieces[model.unk_id].text if model.unk_id is not None else None
    return BPE(
        vocab=vocab,
        merges=derive_merges(model.pieces),
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=_has_bytes(model),
    )


def derive_merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Merge rules, best first, under which rank-driven BPE merges as SentencePiece does by score.

    SentencePiece joins the neighbours whose concatenation is the best-scored piece. So every way to cut a piece in two
    pieces is a rule, and rules rank by the score of what they make. Rules for the same piece are only ever in
    competition where two occurrences of it overlap; the leftmost should win, which the cut with the longer left part
    first gives. Only ordinary pieces take part: control, byte and user-defined ones are never joined from text.
    """
    order = sorted(
        (i for i, piece in enumerate(pieces) if piece.type == PieceType.NORMAL and len(piece.text) > 1),
        key=lambda i: (-pieces[i].score, i),
    )
    parts = {piece.text for piece in pieces if piece.type == PieceType.NORMAL}
    merges: list[tuple[str, str]] = []
    for i in order:
        text = pieces[i].text
        for cut in range(len(text) - 1, 0, -1):
            left = text[:cut]
            if left in parts and (right := text[cut:]) in parts:
                merges.append((left, right))
    return merges


def _unigram(model: SentencePieceModel, where: str) -> Unigram:
    if model.unk_id is None:
        raise CheckpointError(f"{where}: a unigram model needs an unknown token, and this one has none")
    ordinary = [piece.score for piece in model.pieces if piece.type == PieceType.NORMAL]
    unmatchable = _UNMATCHABLE_PENALTY * min([*ordinary, -1.0])
    vocab = [(_surface(p), p.score if p.type == PieceType.NORMAL else unmatchable) for p in model.pieces]
    return Unigram(vocab=vocab, unk_id=model.unk_id, byte_fallback=_has_bytes(model))


def _normalizers(model: SentencePieceModel, user_defined: Sequence[str], where: str) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if model.precompiled_charsmap:
        with library_errors(
            lambda why: CheckpointError(f"{where}: precompiled_charsmap cannot be read ({why}); the file is damaged")
        ):
            charsmap = normalizers.Precompiled(model.precompiled_charsmap)
            charsmap.normalize_str("a e\u0301 \u2460 \u4e2d")  # the trie is only looked at when it is used
        steps.append(charsmap)
    if model.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(r"\A +"), ""),
            normalizers.Replace(Regex(rf"[ {SPACE}]+\z"), ""),
            normalizers.Replace(Regex(r" {2,}"), " "),
        ]
    steps.append(normalizers.Replace(" ", SPACE))
    if model.add_dummy_prefix:
        if user_defined:
            # The library normalizes user-defined tokens too before it looks for them, and they must stay without
            # prefix. The price: a text that is nothing but one such token gets none either.
            whole = "|".join(re.escape(text.replace(" ", SPACE)) for text in user_defined)
            steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{whole})\z)"), SPACE))
        else:
            steps.append(normalizers.Prepend(SPACE))
    return steps


def _decoder(model: SentencePieceModel) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if _has_bytes(model):
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def is_byte_piece(text: str) -> bool:
    """Whether `text` is spelled like a byte piece (`<0x0A>`)."""
    return _BYTE_PIECE.fullmatch(text) is not None
