"""`Tokenizer` as an engine uses it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from aotllm.builder.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from aotllm.errors import EngineError, InvalidRequest
from aotllm.tokenization import Tokenizer
from aotllm.tokenization.byte_vocabulary import _BYTE_ALPHABET
from tests.tokenizer_models import gguf_metadata, train_sentencepiece
from tests.tokenizer_texts import HARD_TEXTS, any_text

WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m.content }}{% endfor %}"
USER = [{"role": "user", "content": "the dog"}]


@pytest.fixture(scope="module")
def spm_json() -> str:
    return tokenizer_from_gguf(gguf_metadata(train_sentencepiece())).tokenizer_json


@pytest.fixture(scope="module")
def spm(spm_json) -> Tokenizer:
    return Tokenizer(spm_json, WITH_BOS, "<s>", "</s>")


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*_BYTE_ALPHABET, "Ġt", "ðŁĺ", "<|end|>", "<日>"])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|end|>", "<日>"])
    return Tokenizer(raw.to_str())


def test_byte_alphabet_is_the_one_of_the_library():
    assert set(_BYTE_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    decode = decoders.ByteLevel().decode
    assert all(decode([char]) == bytes([byte]).decode("utf-8", "replace") for char, byte in _BYTE_ALPHABET.items())


class TestTokenBytes:
    def test_byte_level(self, byte_level):
        cases = {
            "Ġt": b" t",
            "a": b"a",
            "ðŁĺ": b"\xf0\x9f\x98",
            "Ā": b"\x00",
            "<|end|>": b"<|end|>",
            "<日>": "<日>".encode(),
        }
        assert {token: byte_level.token_bytes(byte_level.token_to_id(token)) for token in cases} == cases

    def test_sentencepiece(self, spm):
        cases = {"▁the": b" the", "<0x0A>": b"\n", "<0xF0>": b"\xf0", "a": b"a", "</s>": b"</s>"}
        assert {token: spm.token_bytes(spm.token_to_id(token)) for token in cases} == cases

    @pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
    def test_ids_without_a_token_have_no_bytes(self, spm, byte_level, token_id):
        assert spm.token_bytes(token_id) == byte_level.token_bytes(token_id) == b""
        assert spm.decode([token_id]) == ""

    def test_they_make_up_the_text(self, byte_level):
        for text in HARD_TEXTS.values():
            assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()


class TestText:
    """What text is made of, and a grammar may allow."""

    @staticmethod
    def tokenizer() -> Tokenizer:
        vocab = {"a": 0, "<unused7>": 1, "[unused1]": 2, "<|reserved_special|>": 3, "<b>": 4, "<0x41>": 5}
        raw = RawTokenizer(models.WordLevel(vocab, unk_token="a"))
        raw.decoder = decoders.ByteLevel()
        raw.add_special_tokens([AddedToken("<|end|>", special=True)])
        raw.add_tokens([AddedToken("<tool_call>"), AddedToken("\n\n"), AddedToken("▁▁")])
        return Tokenizer(raw.to_str())

    @pytest.mark.parametrize("token", ["a", "<b>", "<0x41>", "\n\n", "▁▁"])
    def test_text(self, token):
        tokenizer = self.tokenizer()
        assert tokenizer.byte_vocabulary.is_text(tokenizer.token_to_id(token))

    @pytest.mark.parametrize("token", ["<|end|>", "<tool_call>", "<unused7>", "[unused1]", "<|reserved_special|>"])
    def test_markup(self, token):
        tokenizer = self.tokenizer()
        assert not tokenizer.byte_vocabulary.is_text(tokenizer.token_to_id(token))

    @pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
    def test_ids_without_a_token(self, spm, token_id):
        assert not spm.byte_vocabulary.is_text(token_id)


class TestEncodeAndDecode:
    @given(text=any_text)
    def test_byte_level_round_trip(self, byte_level, text):
        assert byte_level.decode(byte_level.encode(text)) == text

    @given(ids=st.lists(st.integers(0, 262), max_size=20), skip=st.booleans())
    def test_byte_level_decoding_is_the_library_s(self, byte_level, ids, skip):
        assert byte_level.decode(ids, skip) == byte_level._codec.raw.decode(ids, skip_special_tokens=skip)

    @given(text=any_text, skip=st.booleans())
    def test_sentencepiece_decoding_of_text_is_the_library_s(self, spm, text, skip):
        ids = spm.encode(text)
        assert spm.decode(ids, skip) == spm._codec.raw.decode(ids, skip_special_tokens=skip)

    def test_special_tokens(self, spm):
        ids = spm.encode("the dog")
        assert ids == [1, *spm.encode("the dog", add_special_tokens=False)]
        assert spm.decode(ids) == "the dog"
        assert spm.decode(ids, skip_special_tokens=False) == "<s> the dog"
        assert [spm.is_special(i) for i in (0, 1, 2, 3)] == [True, True, True, False]

    @pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "\ud83d x"])
    def test_half_a_surrogate_pair_is_an_invalid_request(self, spm, text):
        with pytest.raises(InvalidRequest, match="surrogate"):
            spm.encode(text)
        with pytest.raises(InvalidRequest, match="surrogate") as caught:
            spm.encode_chat([{"role": "user", "content": text}])
        assert caught.value.param == "messages"

    def test_a_library_that_panics_is_an_engine_error(self, spm_json):
        """Rust panics are no `Exception`s, so nothing else would catch them."""
        raw = RawTokenizer.from_str(spm_json)
        raw.normalizer = normalizers.Precompiled(b"\x04\0\0\0\xff\xff\xff\x7f")
        tokenizer = Tokenizer(raw.to_str())
        with pytest.raises(EngineError, match="panicked"):
            tokenizer.encode("the dog")

    def test_settings_for_training_are_ignored(self, spm_json):
        raw = RawTokenizer.from_str(spm_json)
        raw.enable_truncation(4)
        raw.enable_padding(length=64)
        plain, configured = Tokenizer(spm_json), Tokenizer(raw.to_str())
        assert configured.encode("the dog and the fox") == plain.encode("the dog and the fox")

    def test_vocab_size(self, spm_json, spm):
        assert spm.vocab_size == len(json.loads(spm_json)["model"]["vocab"])


class TestDecoders:
    """What other tokenizer.json files hold."""

    @pytest.mark.parametrize(
        ("decoder", "first", "text"),
        [
            (decoders.Metaspace(), "▁the", "the dog"),
            (decoders.Metaspace(prepend_scheme="never"), "▁the", " the dog"),
            (
                decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
                "▁the",
                " the dog",
            ),
            (decoders.Sequence([decoders.Metaspace(), decoders.Fuse()]), "the", "the dog"),
        ],
    )
    def test_supported(self, decoder, first, text):
        raw = RawTokenizer(models.BPE(vocab={first: 0, "▁dog": 1}, merges=[]))
        raw.decoder = decoder
        assert Tokenizer(raw.to_str()).decode([0, 1]) == raw.decode([0, 1]) == text

    @pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder()])
    def test_unsupported(self, decoder):
        raw = RawTokenizer(models.BPE())
        if decoder is not None:
            raw.decoder = decoder
        with pytest.raises(EngineError, match="decoder"):
            Tokenizer(raw.to_str())


class TestChat:
    @pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
    @pytest.mark.parametrize("add_special_tokens", [False, True])
    def test_never_two_bos(self, spm_json, template, add_special_tokens):
        tokenizer = Tokenizer(spm_json, template, "<s>", "</s>")
        ids = tokenizer.encode_chat(USER, add_special_tokens=add_special_tokens)
        has_bos = template == WITH_BOS or add_special_tokens
        assert ids == [1] * has_bos + tokenizer.encode("the dog", add_special_tokens=False)

    def test_template_gets_everything(self, spm_json):
        source = "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ tools }}{{ extra }}"
        tokenizer = Tokenizer(spm_json, source, "<s>", "</s>")
        assert tokenizer.apply_chat_template(USER, False, [{"n": 1}], extra="!") == "<s></s>False[{'n': 1}]!"

    def test_without_template_it_points_to_raw_prompts(self, spm_json):
        with pytest.raises(InvalidRequest, match="no chat template.*raw prompt") as caught:
            Tokenizer(spm_json).encode_chat(USER)
        assert caught.value.param == "messages"

    def test_a_broken_template_spoils_chats_only(self, spm_json):
        tokenizer = Tokenizer(spm_json, "{% for %}")
        assert tokenizer.encode("the dog")
        with pytest.raises(InvalidRequest, match="does not compile"):
            tokenizer.encode_chat(USER)


class TestFolder:
    def test_reads_what_an_engine_holds(self, tmp_path, spm_json):
        (tmp_path / "tokenizer.json").write_text(spm_json, encoding="utf-8")
        assert Tokenizer.from_folder(tmp_path).chat_template is None
        (tmp_path / "chat_template.jinja").write_text(WITH_BOS, encoding="utf-8")
        tokenizer = Tokenizer.from_folder(tmp_path, "<s>", "</s>")
        assert tokenizer.encode_chat(USER) == tokenizer.encode("the dog")

    @pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b'{"model": 1}'])
    def test_missing_or_damaged_tokenizer(self, tmp_path, content):
        if content is not None:
            (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(EngineError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)
