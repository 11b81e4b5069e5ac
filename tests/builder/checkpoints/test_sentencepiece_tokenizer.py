"""SentencePiece models give the same ids as the sentencepiece package, whatever container they come in."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as pb

from aotllm.builder.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from aotllm.builder.checkpoints.huggingface_tokenizer import tokenizer_from_folder
from aotllm.builder.checkpoints.sentencepiece_tokenizer_file import read_sentencepiece_model
from aotllm.errors import CheckpointError, UnsupportedModel
from aotllm.tokenization import Tokenizer
from tests.tokenizer_models import gguf_metadata, oracle, train_sentencepiece, write_sentencepiece
from tests.tokenizer_texts import HARD_TEXTS, any_text, plain_text

MODELS = {
    "bpe": {},
    "bpe without dummy prefix": {"add_dummy_prefix": False},
    "bpe with user-defined pieces": {"user_defined_symbols": ["<sep>", "▁▁", "▁▁▁▁", "\n"]},
    "bpe with user-defined pieces, no prefix": {
        "user_defined_symbols": ["<sep>", "▁▁", "\n"],
        "add_dummy_prefix": False,
    },
    "bpe without bytes": {"byte_fallback": False},
    "bpe that removes extra spaces": {"remove_extra_whitespaces": True},
    "bpe with split digits": {"split_digits": True},
    "bpe with nmt_nfkc": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
}


def from_model(model: bytes, folder: Path) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(model)
    return Tokenizer(tokenizer_from_folder(folder).tokenizer_json)


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    model = train_sentencepiece(**MODELS[request.param])
    return from_model(model, tmp_path_factory.mktemp("model")), oracle(model)


@pytest.mark.parametrize("name", HARD_TEXTS)
def test_trained_bpe_matches_on_hard_texts(pair, name):
    tokenizer, reference = pair
    assert tokenizer.encode(HARD_TEXTS[name], add_special_tokens=False) == reference.encode(HARD_TEXTS[name])


@given(text=plain_text | any_text)
@settings(max_examples=300, deadline=None)
def test_trained_bpe_matches_on_any_text(pair, text):
    tokenizer, reference = pair
    assume(text.replace(" ", "▁") not in ("\n", "▁▁", "▁▁▁▁", "<sep>"))  # see test_text_that_is_one_user_defined_token
    assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)


def test_text_that_is_one_user_defined_token(tmp_path):
    """The one known difference: such a text gets no dummy prefix."""
    model = train_sentencepiece(user_defined_symbols=["<sep>"])
    tokenizer, reference = from_model(model, tmp_path), oracle(model)
    (sep,) = tokenizer.encode("<sep>", add_special_tokens=False)
    assert reference.encode("<sep>") == [reference.piece_to_id("▁"), sep]
    assert tokenizer.encode("<sep><sep>", add_special_tokens=False) == reference.encode("<sep><sep>")


@given(ids=st.lists(st.integers(0, 400), max_size=20))
@settings(max_examples=300, deadline=None)
def test_decoding_matches(pair, ids):
    tokenizer, reference = pair
    # sentencepiece shows <unk> as " ⁇ ", lets control tokens break a character, and keeps a leading <0x20>
    ids = [i for i in ids if 2 < i < reference.vocab_size() and reference.id_to_piece(i) != "<0x20>"]
    assert tokenizer.decode(ids) == reference.decode(ids)


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    model = train_sentencepiece("unigram")
    return from_model(model, tmp_path_factory.mktemp("unigram")), oracle(model)


@given(text=plain_text | any_text)
@settings(max_examples=300, deadline=None)
def test_unigram_matches_on_any_text(unigram, text):
    tokenizer, reference = unigram
    assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)


@pytest.mark.parametrize("name", HARD_TEXTS.keys() - {"very long"})  # has many segmentations of equal likelihood
def test_unigram_matches_on_hard_texts(unigram, name):
    tokenizer, reference = unigram
    assert tokenizer.encode(HARD_TEXTS[name], add_special_tokens=False) == reference.encode(HARD_TEXTS[name])


@given(
    merged=st.lists(st.text(alphabet="ab▁", min_size=2, max_size=5), max_size=12, unique=True),
    texts=st.lists(st.text(alphabet="ab ", max_size=12), min_size=1, max_size=8),
    prefix=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_any_scored_vocabulary_merges_by_score(merged, texts, prefix):
    """The vocabulary need not come from training: merges follow the scores, in the given order."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(text, -float(i), 1) for i, text in enumerate([*merged, "a", "b", "▁"])]
    model = write_sentencepiece(pieces, add_dummy_prefix=prefix)
    tokenizer = Tokenizer(tokenizer_from_gguf(gguf_metadata(model)).tokenizer_json)
    reference = oracle(model)
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)


class TestModelFile:
    def test_reads_what_protobuf_reads(self, tmp_path):
        data = train_sentencepiece(user_defined_symbols=["<sep>"], control_symbols=["<ctl>"], pad_id=3)
        proto = pb.ModelProto.FromString(data)
        (tmp_path / "tokenizer.model").write_bytes(data)
        model, bos, eos = read_sentencepiece_model(tmp_path / "tokenizer.model")
        assert [(p.text, p.score, int(p.type)) for p in model.pieces] == [
            (p.piece, p.score, p.type) for p in proto.pieces
        ]
        assert (int(model.model_type), bos, eos) == (
            proto.trainer_spec.model_type,
            proto.trainer_spec.bos_id,
            proto.trainer_spec.eos_id,
        )
        assert model.add_dummy_prefix == proto.normalizer_spec.add_dummy_prefix
        assert model.remove_extra_whitespaces == proto.normalizer_spec.remove_extra_whitespaces
        assert model.precompiled_charsmap == proto.normalizer_spec.precompiled_charsmap

    def test_every_truncation_is_an_error_unless_protobuf_takes_it_too(self, tmp_path):
        data = write_sentencepiece([("<unk>", 0.0, 2), ("a", -1.0, 1), ("b", -2.0, 1)], add_dummy_prefix=True)
        path = tmp_path / "tokenizer.model"
        errors = 0
        for size in range(len(data)):
            path.write_bytes(data[:size])
            try:
                model, _, _ = read_sentencepiece_model(path)
            except CheckpointError:
                errors += 1
            else:  # cut between two fields
                assert [p.text for p in model.pieces] == [p.piece for p in pb.ModelProto.FromString(data[:size]).pieces]
        assert errors > len(data) // 2

    @given(data=st.binary(max_size=200))
    @settings(max_examples=300, deadline=None)
    def test_garbage_is_a_checkpoint_error_or_a_model(self, tmp_path_factory, data):
        path = tmp_path_factory.getbasetemp() / "tokenizer.model"
        path.write_bytes(data)
        with pytest.raises((CheckpointError, UnsupportedModel)):
            read_sentencepiece_model(path)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", "no pieces"),
            (b"\x0a\x05abc", "needs 5 bytes"),
            (b"\x80" * 11, "varint does not end"),
            (b"\x0b", "wire type 3"),
            (b"\x02\x00", "field number 0"),
            (b"\x0a\x03\x0a\x01\xff", "piece 0 is not UTF-8"),
            (b"\x0a\x05\x0a\x01a\x18\x09", "type of piece 0 is 9"),
            (b"\x0a\x08\x0a\x01a\x15" + struct.pack("<f", float("nan")), "not a number"),
            (b"\x0a\x03\x0a\x01a", "no piece is of type unknown"),
            (b"\x08\x01", "wrong wire type"),
        ],
    )
    def test_malformed_files_say_what_is_wrong(self, tmp_path, data, reason):
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(CheckpointError, match=reason):
            read_sentencepiece_model(tmp_path / "tokenizer.model")

    @pytest.mark.parametrize(
        ("spec", "field", "value", "reason"),
        [
            ("trainer_spec", "model_type", pb.TrainerSpec.WORD, "model type word"),
            ("trainer_spec", "treat_whitespace_as_suffix", True, "treat_whitespace_as_suffix"),
            ("normalizer_spec", "escape_whitespaces", False, "escape_whitespaces"),
        ],
    )
    def test_features_that_change_ids_are_refused(self, tmp_path, spec, field, value, reason):
        proto = pb.ModelProto.FromString(train_sentencepiece())
        setattr(getattr(proto, spec), field, value)
        (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
        with pytest.raises(UnsupportedModel, match=reason):
            tokenizer_from_folder(tmp_path)

    @pytest.mark.parametrize("charsmap", [b"\x01", b"\xff\xff\xff\xff", b"\x04\0\0\0\xff\xff\xff\x7f"])
    def test_a_damaged_normalization_table_is_an_error(self, tmp_path, charsmap):
        """The last one makes the library's Rust code panic."""
        proto = pb.ModelProto.FromString(train_sentencepiece())
        proto.normalizer_spec.precompiled_charsmap = charsmap
        (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
        with pytest.raises(CheckpointError, match="precompiled_charsmap"):
            tokenizer_from_folder(tmp_path)
