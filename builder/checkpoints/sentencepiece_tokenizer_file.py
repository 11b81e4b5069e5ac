"""Reader of `tokenizer.model`: SentencePiece's `ModelProto` in protobuf wire format.

Field numbers are those of sentencepiece_model.proto. Only the fields that change ids are decoded, the others are
skipped by wire type; anything that is not well-formed is an error, never a guess.
Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

from aotllm.builder.checkpoints.sentencepiece_tokenizer import ModelType, Piece, PieceType, SentencePieceModel
from aotllm.errors import CheckpointError, UnsupportedModel

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10

# ModelProto
_PIECES, _TRAINER_SPEC, _NORMALIZER_SPEC = 1, 2, 3
# ModelProto.SentencePiece
_PIECE, _SCORE, _TYPE = 1, 2, 3
# TrainerSpec
_MODEL_TYPE, _TREAT_WHITESPACE_AS_SUFFIX, _UNK_ID, _BOS_ID, _EOS_ID = 3, 24, 40, 41, 42
# NormalizerSpec
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5

Value = int | bytes


class _Malformed(Exception):
    """Why the bytes are no ModelProto"""


def read_sentencepiece_model(path: Path) -> tuple[SentencePieceModel, int | None, int | None]:
    """Read a `tokenizer.model` file.

    Returns:
        The model, and the ids of BOS and EOS (None where the model has none).

    Raises:
        CheckpointError: the file is truncated or malformed.
        UnsupportedModel: the model uses a feature that changes ids and is not implemented.
    """
    try:
        return _model(path.read_bytes(), path.name)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None
    except _Malformed as error:
        raise CheckpointError(
            f"{path.name} is not a SentencePiece model: {error}; the file is truncated or damaged, fetch it again"
        ) from None


def _model(data: bytes, where: str) -> tuple[SentencePieceModel, int | None, int | None]:
    pieces: list[Piece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for field, value in _fields(data):
        if field == _PIECES:
            pieces.append(_piece(_bytes(value, "piece"), len(pieces)))
        elif field == _TRAINER_SPEC:
            trainer.update(_fields(_bytes(value, "trainer_spec")))
        elif field == _NORMALIZER_SPEC:
            normalizer.update(_fields(_bytes(value, "normalizer_spec")))
    if not pieces:
        raise _Malformed("it has no pieces")
    if _flag(trainer, _TREAT_WHITESPACE_AS_SUFFIX, False):
        raise UnsupportedModel(f"{where}: treat_whitespace_as_suffix is not supported")
    if not _flag(normalizer, _ESCAPE_WHITESPACES, True):
        raise UnsupportedModel(f"{where}: escape_whitespaces = false is not supported")
    unk_id = next((i for i, piece in enumerate(pieces) if piece.type == PieceType.UNKNOWN), None)
    if unk_id is None:
        raise _Malformed("no piece is of type unknown")
    model_type = _int(trainer, _MODEL_TYPE, ModelType.UNIGRAM)
    if model_type not in set(ModelType):
        raise _Malformed(f"model type {model_type} is not in 1..4")
    model = SentencePieceModel(
        pieces=pieces,
        model_type=ModelType(model_type),
        unk_id=unk_id,
        add_dummy_prefix=_flag(normalizer, _ADD_DUMMY_PREFIX, True),
        remove_extra_whitespaces=_flag(normalizer, _REMOVE_EXTRA_WHITESPACES, True),
        precompiled_charsmap=_bytes(normalizer.get(_CHARSMAP, b""), "precompiled_charsmap"),
    )
    return model, _token_id(trainer, _BOS_ID, 1, pieces), _token_id(trainer, _EOS_ID, 2, pieces)


def _piece(data: bytes, index: int) -> Piece:
    fields = dict(_fields(data))
    try:
        text = _bytes(fields.get(_PIECE, b""), "piece text").decode("utf-8")
    except UnicodeDecodeError:
        raise _Malformed(f"piece {index} is not UTF-8") from None
    if not text:
        raise _Malformed(f"piece {index} is empty")
    raw_score = _bytes(fields.get(_SCORE, bytes(4)), "score")
    if len(raw_score) != 4:
        raise _Malformed(f"the score of piece {index} is not a 32-bit float")
    score = struct.unpack("<f", raw_score)[0]
    if math.isnan(score):
        raise _Malformed(f"the score of piece {index} is not a number")
    kind = _int(fields, _TYPE, PieceType.NORMAL)
    if kind not in set(PieceType):
        raise _Malformed(f"the type of piece {index} is {kind}, not in 1..6")
    return Piece(text, score, PieceType(kind))


def _token_id(trainer: dict[int, Value], field: int, default: int, pieces: list[Piece]) -> int | None:
    index = _int(trainer, field, default)
    if 0 <= index < len(pieces) and pieces[index].type == PieceType.CONTROL:
        return index
    return None


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(field number, value) pairs of one message: int for varints, bytes for everything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if field == 0:
            raise _Malformed(f"field number 0 at byte {at}")
        if wire == _VARINT:
            number, at = _varint(data, at)
            yield field, number
            continue
        if wire == _LEN:
            size, at = _varint(data, at)
        elif wire in (_I64, _I32):
            size = 8 if wire == _I64 else 4
        else:
            raise _Malformed(f"wire type {wire} at byte {at}")
        if size > len(data) - at:
            raise _Malformed(f"field {field} needs {size} bytes at byte {at}, and {len(data) - at} are left")
        yield field, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise _Malformed(f"a varint does not end at byte {at}")


def _bytes(value: Value, name: str) -> bytes:
    if not isinstance(value, bytes):
        raise _Malformed(f"{name} has the wrong wire type")
    return value


def _int(fields: dict[int, Value], field: int, default: int) -> int:
    value = fields.get(field, default)
    if not isinstance(value, int):
        raise _Malformed(f"field {field} has the wrong wire type")
    # int32 on the wire is sign-extended to 64 bits.
    return value - (1 << 64) if value >= 1 << 63 else value


def _flag(fields: dict[int, Value], field: int, default: bool) -> bool:
    return _int(fields, field, int(default)) != 0
