"""Small SentencePiece models for tests, trained or written by hand with the sentencepiece package."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as pb

_CORPUS = """\
The quick brown fox jumps over the lazy dog, and the dog does not mind at all.
There is no need to say that the cat sat on the mat; it was there that it sat.
She sells sea shells by the sea shore, and the shells she sells are sea shells.
def main(argument): return argument + 1 if argument else None
for index in range(100): print(index, index * index)
Was weder die Katze noch der Hund wissen, weiß der Fuchs über alle Füchse.
Le café déjà vu était près de la forêt, où l'été dernier il y avait des fêtes.
中文字符 日本語のテスト 한국어 시험입니다 हिन्दी ภาษาไทย
banana bandana ananas anna hannah aaaa aaaaaaaa aabaab abababab
1 2 3 10 11 12 100 123 1234 2024 3333 3.14159
"""


def train_sentencepiece(model_type: str = "bpe", **options: Any) -> bytes:
    """A trained model as the bytes of a tokenizer.model: byte fallback, no normalization, dummy prefix."""
    out = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": 480,
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS.splitlines() * 4), model_writer=out, **{**settings, **options}
    )
    return out.getvalue()


def write_sentencepiece(pieces: Iterable[tuple[str, float, int]], *, add_dummy_prefix: bool) -> bytes:
    """A BPE model with exactly these (text, score, type) pieces."""
    model = pb.ModelProto()
    for text, score, kind in pieces:
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.model_type = pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = any(kind == 6 for _, _, kind in pieces)
    model.trainer_spec.unk_id = next(i for i, (_, _, kind) in enumerate(pieces) if kind == 2)
    model.normalizer_spec.add_dummy_prefix = add_dummy_prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


def gguf_metadata(model: bytes, **overrides: Any) -> dict[str, Any]:
    """The same vocabulary as GGUF files hold it."""
    proto = pb.ModelProto.FromString(model)
    user_defined = pb.ModelProto.SentencePiece.USER_DEFINED
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            p.piece.replace("▁", " ") if p.type == user_defined else p.piece for p in proto.pieces
        ],
        "tokenizer.ggml.scores": [p.score for p in proto.pieces],
        "tokenizer.ggml.token_type": [p.type for p in proto.pieces],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
    }
    metadata.update(overrides)
    return {key: value for key, value in metadata.items() if value is not None}


def oracle(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)
