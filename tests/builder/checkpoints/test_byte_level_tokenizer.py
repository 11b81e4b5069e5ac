"""How byte-level tokenizers cut text: against the patterns that other packages hold, and by example."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from aotllm.builder.checkpoints.byte_level_tokenizer import PRE_TOKENIZERS, build_byte_level_tokenizer
from aotllm.builder.checkpoints.special_tokenizer_parts import SpecialTokens
from tests.tokenizer_texts import HARD_TEXTS, any_text, plain_text

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer(pre: str, tokens: list[str] | None = None, merges: list[tuple[str, str]] | None = None) -> RawTokenizer:
    return RawTokenizer.from_str(
        build_byte_level_tokenizer(
            [*BYTES, *(tokens or [])], merges or [], PRE_TOKENIZERS[pre], SpecialTokens(), where="test"
        )
    )


def words(pre: str, text: str) -> list[str]:
    """The words that `text` is cut into, each as text (words end at characters)."""
    raw = tokenizer(pre)
    return [raw.decoder.decode([word]) for word, _ in raw.pre_tokenizer.pre_tokenize_str(text)]


def split(pattern: str, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)]


SHARED = sorted(GGUF_PRE_TOKENIZER_SPLITS.keys() & PRE_TOKENIZERS.keys())


@pytest.mark.parametrize("pre", SHARED)
@given(text=st.sampled_from([*HARD_TEXTS.values()]) | plain_text | any_text)
@settings(max_examples=60, deadline=None)
def test_cuts_as_transformers(pre, text):
    assert words(pre, text) == split(GGUF_PRE_TOKENIZER_SPLITS[pre], text)


@given(text=st.sampled_from([*HARD_TEXTS.values()]) | plain_text | any_text)
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("digits", [False, True])
def test_gpt2_and_smollm_cut_as_the_library_s_own_steps(digits, text):
    steps = [pre_tokenizers.Digits(individual_digits=True)] * digits + [
        pre_tokenizers.ByteLevel(add_prefix_space=False)
    ]
    raw = tokenizer("smollm" if digits else "gpt-2")
    assert raw.pre_tokenizer.pre_tokenize_str(text) == pre_tokenizers.Sequence(steps).pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "Don't pay 12345!", ["Don", "'t", " pay", " 12345", "!"]),
        ("smollm", "in 2024  on", ["in", " ", "2", "0", "2", "4", " ", " on"]),
        ("default", "a, 12345 b", ["a", ",", " ", "123", "45", " b"]),
        ("llama-bpe", "WE'LL pay 12345\n\n!", ["WE", "'LL", " pay", " ", "123", "45", "\n\n", "!"]),
        ("smaug-bpe", "12345", ["123", "45"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("tekken", "HTTPServer isn't 42", ["HTTPServer", " isn", "'t", " ", "4", "2"]),
        ("gpt-4o", "getURLFor isn't 4242", ["get", "URLFor", " isn't", " ", "424", "2"]),
        ("deepseek-v3", "12345中文ab", ["123", "45", "中文", "ab"]),
        ("deepseek-coder", "ab 12\n中", ["ab", " ", "1", "2", "\n", "中"]),
        ("command-r", "a1 b", ["a", "1", " b"]),
        ("seed-coder", "a1!!\n", ["a", "1", "!!", "\n"]),
        ("bailingmoe", "'S x\n\n1", ["'S", " x", "\n\n", "1"]),
    ],
)
def test_examples(pre, text, expected):
    assert words(pre, text) == expected


def test_whole_words_that_no_merge_reaches():
    """Only where the model's tokenizer ignores merges for words that are tokens."""
    assert tokenizer("llama-bpe", ["abc"]).encode("abc").tokens == ["abc"]
    assert tokenizer("smaug-bpe", ["abc"]).encode("abc").tokens == ["a", "b", "c"]


def test_normalization_is_the_model_s():
    assert tokenizer("qwen2").encode("e\u0301").ids == tokenizer("qwen2").encode("é").ids
    assert tokenizer("llama-bpe").encode("e\u0301").ids != tokenizer("llama-bpe").encode("é").ids


def test_merges_apply_best_first():
    raw = tokenizer("gpt-2", ["ab", "bc"], [("b", "c"), ("a", "b")])
    assert raw.encode("abc").tokens == ["a", "bc"]
