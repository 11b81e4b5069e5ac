"""`tokenizer.tokens` says what `tokenizer.json` says; what it cannot say is left to the library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from aotllm.builder.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from aotllm.builder.compact_tokens import write_compact_tokens
from aotllm.errors import EngineError
from aotllm.tokenization import Tokenizer
from aotllm.tokenization.compact_codec import CompactCodec
from aotllm.tokenization.library_codec import LibraryCodec
from tests.tokenizer_models import gguf_metadata, train_sentencepiece
from tests.tokenizer_texts import HARD_TEXTS, any_text, plain_text

CORPUS = "the dog and the cat sat there, that is all: 1 22 333 don't \n\n  déjà vu 中文字符\n"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level(*, pre: Any = None, whole_words: bool = False, drop: str = "") -> RawTokenizer:
    """A byte-level tokenizer with the merges of a tiny corpus, and none for bytes that `drop` spells."""
    alphabet = [char for char in sorted(pre_tokenizers.ByteLevel.alphabet()) if char not in drop]
    random.Random(3).shuffle(alphabet)
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    pairs = [
        "Ġ t",
        "h e",
        "Ġt he",
        "Ġ a",
        "n d",
        "Ġa nd",
        "a t",
        "t h",
        "i s",
        "Ċ Ċ",
        "Ġ Ġ",
        "ä ¸",
        "1 2",
        "Ã ©",
        "e r",
        "the re",
    ]
    for pair in pairs:
        left, right = pair.split()
        if left in vocab and right in vocab:
            vocab.setdefault(left + right, len(vocab))
            merges.append((left, right))
    if whole_words:
        vocab["Ġthere"] = len(vocab)  # no merges lead to it
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    raw.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|end|>", AddedToken("<|im_start|>", lstrip=True)])
    raw.add_tokens([AddedToken("<think>", rstrip=True), AddedToken("dog", single_word=True), "\n\n\n"])
    return raw


def sequence(*steps: Any) -> Any:
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece() -> RawTokenizer:
    """As Gemma's: spaces become ▁, whole texts are words, unknown characters bytes."""
    model = train_sentencepiece(add_dummy_prefix=False)
    return RawTokenizer.from_str(tokenizer_from_gguf(gguf_metadata(model)).tokenizer_json)


def framed() -> RawTokenizer:
    raw = byte_level()
    raw.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|end|> $A <|im_start|>",
                special_tokens=[(token, raw.token_to_id(token)) for token in ("<|end|>", "<|im_start|>")],
            ),
        ]
    )
    return raw


KINDS = {
    "byte level": byte_level,
    "whole words": lambda: byte_level(whole_words=True),
    "a vocabulary that lacks bytes": lambda: byte_level(drop="aĀé"),
    "digits and words": lambda: byte_level(
        pre=sequence(
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.Split(Regex(r" ?\p{L}+"), "isolated")
        )
    ),
    "Llama 3": lambda: byte_level(pre=sequence(pre_tokenizers.Split(Regex(LLAMA3), "isolated")), whole_words=True),
    "framed": framed,
    "sentencepiece": sentencepiece,
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LibraryCodec, CompactCodec]:
    path = tmp_path_factory.mktemp("tokens") / "tokenizer.tokens"
    text = KINDS[request.param]().to_str()
    assert write_compact_tokens(text, path)
    return LibraryCodec(text), CompactCodec(path)


def texts_with_markup() -> st.SearchStrategy[str]:
    words = [
        "<|end|>",
        "<|im_start|>",
        "<think>",
        "dog",
        "dogs",
        " ",
        "\n",
        "\n\n\n",
        "the",
        " there",
        "12",
        "\x00word\x00",
        "a",
        "é",
    ]
    return st.lists(st.sampled_from(words), max_size=10).map("".join)


@given(text=st.one_of(any_text, plain_text, texts_with_markup(), st.text(st.sampled_from(CORPUS), max_size=80)))
def test_ids_of_any_text_are_the_library_s(pair: tuple[LibraryCodec, CompactCodec], text: str):
    library, compact = pair
    for add_special_tokens in (False, True):
        assert compact.encode(text, add_special_tokens) == library.encode(text, add_special_tokens)


@pytest.mark.parametrize("name", HARD_TEXTS)
def test_ids_of_hard_texts_are_the_library_s(pair: tuple[LibraryCodec, CompactCodec], name: str):
    library, compact = pair
    assert compact.encode(HARD_TEXTS[name], True) == library.encode(HARD_TEXTS[name], True)


def test_the_vocabulary_is_the_library_s(pair: tuple[LibraryCodec, CompactCodec]):
    library, compact = pair
    assert compact.vocab_size == library.vocab_size
    for token_id in range(-2, library.vocab_size + 3):
        ours, theirs = compact.byte_vocabulary, library.byte_vocabulary
        assert ours.token_bytes(token_id) == theirs.token_bytes(token_id)
        assert ours.is_special(token_id) == theirs.is_special(token_id)
        assert ours.is_text(token_id) == theirs.is_text(token_id)
    for token, token_id in library.raw.get_vocab(with_added_tokens=True).items():
        assert compact.token_to_id(token) == token_id
    assert compact.token_to_id("no such token") is None
    assert (compact.byte_vocabulary.errors, compact.byte_vocabulary.strips_leading_space) == (
        library.byte_vocabulary.errors,
        library.byte_vocabulary.strips_leading_space,
    )


def test_engines_with_tables_are_read_from_them(tmp_path: Path):
    text = byte_level().to_str()
    (tmp_path / "tokenizer.json").write_text("not looked at")
    assert write_compact_tokens(text, tmp_path / "tokenizer.tokens")
    assert Tokenizer.from_folder(tmp_path).encode("the dog") == Tokenizer(text).encode("the dog")


def changed(change: Any) -> str:
    record = json.loads(byte_level().to_str())
    change(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["model"].update(dropout=0.1),
        lambda r: r["model"].update(end_of_word_suffix="</w>"),
        lambda r: r["model"].update(continuing_subword_prefix="##"),
        lambda r: r.update(normalizer=json.loads(normalizers.NFC().__getstate__())),
        lambda r: r["pre_tokenizer"].update(add_prefix_space=True),
        lambda r: r.update(pre_tokenizer=json.loads(pre_tokenizers.Metaspace().__getstate__())),
        lambda r: r.update(pre_tokenizer=None),
        lambda r: r.update(post_processor=json.loads(processors.BertProcessing(("a", 0), ("b", 1)).__getstate__())),
        lambda r: r.update(decoder=None),
    ],
)
def test_other_tokenizers_have_no_tables(tmp_path: Path, change: Any):
    assert not write_compact_tokens(changed(change), tmp_path / "tokenizer.tokens")
    assert not (tmp_path / "tokenizer.tokens").exists()


def test_other_models_have_no_tables(tmp_path: Path):
    raw = RawTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    raw.decoder = decoders.ByteLevel()
    assert not write_compact_tokens(raw.to_str(), tmp_path / "tokenizer.tokens")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_an_engine_error_or_gives_other_ids(tmp_path: Path, data: st.DataObject):
    """It never crashes or hangs; the engine's digests find what is not seen here."""
    path = tmp_path / "tokenizer.tokens"
    assert write_compact_tokens(byte_level().to_str(), path)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        codec = CompactCodec(path)
        codec.encode("the dog and there", True)
        codec.byte_vocabulary.token_bytes(3)
    except EngineError:
        pass
