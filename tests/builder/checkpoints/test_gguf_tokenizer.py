"""Tokenizers of GGUF files against oracles that share no code with the converter."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from aotllm.builder.checkpoints.byte_level_tokenizer import PRE_TOKENIZERS
from aotllm.builder.checkpoints.gguf import GgufCheckpoint
from aotllm.builder.checkpoints.gguf_tokenizer import eos_token_ids, tokenizer_from_gguf
from aotllm.errors import CheckpointError, UnsupportedModel
from aotllm.tokenization import Tokenizer
from aotllm.tokenization.byte_vocabulary import _BYTE_ALPHABET
from tests.tokenizer_models import gguf_metadata, oracle, train_sentencepiece, write_sentencepiece
from tests.tokenizer_texts import HARD_TEXTS, any_text, plain_text


@cache
def read_metadata(path) -> dict[str, Any]:
    with GgufCheckpoint(path) as checkpoint:
        return dict(checkpoint.metadata)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return Tokenizer(tokenizer_from_gguf(read_metadata(smollm2_gguf)).tokenizer_json)


@pytest.fixture(scope="module")
def smollm2_tiktoken(smollm2_gguf) -> tiktoken.Encoding:
    """The same vocabulary in OpenAI's implementation: merges by id, one pattern that does what two splits do."""
    metadata = read_metadata(smollm2_gguf)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    return tiktoken.Encoding(
        name="smollm2",
        pat_str=r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
        mergeable_ranks={
            bytes(_BYTE_ALPHABET[c] for c in t): i for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if k == 1
        },
        special_tokens={t: i for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if k == 3},
    )


class TestSmolLM2:
    """A real byte-level vocabulary. It has no tokens for 21 byte values, so texts that need those lose them."""

    MISSING = re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]")

    @pytest.mark.parametrize("name", HARD_TEXTS)
    def test_ids_equal_tiktoken(self, smollm2, smollm2_tiktoken, name):
        text = HARD_TEXTS[name]
        assert smollm2.encode(text) == smollm2_tiktoken.encode(text, allowed_special="all")

    @given(text=plain_text | any_text)
    @settings(max_examples=500, deadline=None)
    def test_ids_equal_tiktoken_on_any_text(self, smollm2, smollm2_tiktoken, text):
        text = self.MISSING.sub("", text)
        assert smollm2.encode(text) == smollm2_tiktoken.encode(text, allowed_special="all")

    @given(text=plain_text | any_text)
    @settings(max_examples=500, deadline=None)
    def test_round_trip(self, smollm2, text):
        text = self.MISSING.sub("", text)
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text

    def test_missing_bytes_are_dropped(self, smollm2):
        assert smollm2.decode(smollm2.encode("a\x04b")) == "ab"

    @given(ids=st.lists(st.integers(0, 49_151), max_size=20), skip=st.booleans())
    @settings(max_examples=500, deadline=None)
    def test_decoding_equals_the_library(self, smollm2_gguf, smollm2, ids, skip):
        assert smollm2.decode(ids, skip) == library(smollm2_gguf).decode(ids, skip)

    @pytest.mark.slow
    def test_ids_equal_transformers(self, smollm2_gguf, smollm2):
        """transformers does not know this pre-tokenizer and lets a space stick to a digit, so without digits."""
        transformers = pytest.importorskip("transformers")
        reference = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
        for text in HARD_TEXTS.values():
            text = "".join(char for char in text if not char.isnumeric())
            assert smollm2.encode(text) == reference.encode(text)

    def test_assets(self, smollm2_gguf):
        assets = tokenizer_from_gguf(read_metadata(smollm2_gguf))
        assert (assets.bos_token, assets.eos_token, assets.add_bos) == ("<|im_start|>", "<|im_end|>", False)
        assert "<|im_start|>" in assets.chat_template
        assert assets.generation_config["eos_token_id"] == [2, 0], "<|im_end|> by key, <|endoftext|> by name"


@cache
def library(path) -> RawTokenizer:
    return RawTokenizer.from_str(tokenizer_from_gguf(read_metadata(path)).tokenizer_json)


@pytest.fixture(scope="module")
def gemma3_pair(gemma3_gguf):
    """Our tokenizer, and the same pieces as a SentencePiece model."""
    metadata = read_metadata(gemma3_gguf)
    pieces = []
    for token, score, kind in zip(
        *(metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")), strict=True
    ):
        text = token.replace(" ", "▁") if kind == 4 else token
        pieces.append((text, score, 2 if token == "<unk>" else kind))
    reference = oracle(write_sentencepiece(pieces, add_dummy_prefix=False))
    return Tokenizer(tokenizer_from_gguf(metadata).tokenizer_json), reference


@pytest.mark.slow
class TestGemma3:
    """A real SentencePiece vocabulary of 262,144 tokens, against the sentencepiece package."""

    def test_hard_texts(self, gemma3_pair):
        tokenizer, reference = gemma3_pair
        for text in HARD_TEXTS.values():
            assert tokenizer.encode(text) == [2, *reference.encode(text)]

    @given(text=plain_text | any_text)
    @settings(max_examples=1000, deadline=None)
    def test_any_text(self, gemma3_pair, text):
        tokenizer, reference = gemma3_pair
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)

    def test_assets(self, gemma3_gguf):
        assets = tokenizer_from_gguf(read_metadata(gemma3_gguf))
        assert (assets.bos_token, assets.eos_token, assets.add_bos) == ("<bos>", "<eos>", True)
        assert assets.generation_config["eos_token_id"] == [1, 106], "<end_of_turn> ends a turn, though no key says so"


@pytest.fixture(scope="module")
def spm():
    return train_sentencepiece(user_defined_symbols=["<sep>", "▁▁"], control_symbols=["<turn|>"])


class TestSentencePieceMetadata:
    @pytest.mark.parametrize("as_arrays", [False, True])
    def test_same_ids_as_the_model_file(self, spm, as_arrays):
        metadata = gguf_metadata(spm)
        if as_arrays:
            for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
                metadata[key] = np.array(metadata[key])
            metadata["tokenizer.ggml.bos_token_id"] = np.uint32(1)
        tokenizer = Tokenizer(tokenizer_from_gguf(metadata).tokenizer_json)
        for text in HARD_TEXTS.values():
            assert tokenizer.encode(text) == [1, *oracle(spm).encode(text)]

    def test_control_tokens_are_recognized_in_text_and_restart_it(self, spm):
        tokenizer = Tokenizer(tokenizer_from_gguf(gguf_metadata(spm)).tokenizer_json)
        hello = oracle(spm).encode("hello")
        assert tokenizer.encode("<s>hello</s>hello", add_special_tokens=False) == [1, *hello, 2, *hello]

    @pytest.mark.parametrize(
        ("flags", "frame"),
        [
            ({}, (1, None)),
            ({"tokenizer.ggml.add_bos_token": False}, (None, None)),
            ({"tokenizer.ggml.add_eos_token": True}, (1, 2)),
            ({"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}, (None, 2)),
            ({"tokenizer.ggml.bos_token_id": None}, (1, None)),
            ({"tokenizer.ggml.bos_token_id": 2}, (2, None)),
        ],
    )
    def test_framing(self, spm, flags, frame):
        assets = tokenizer_from_gguf(gguf_metadata(spm, **flags))
        before, after = ([i] if i is not None else [] for i in frame)
        assert assets.add_bos == bool(before)
        assert Tokenizer(assets.tokenizer_json).encode("a") == [*before, *oracle(spm).encode("a"), *after]

    def test_unused_and_padding_tokens_never_come_out_of_text(self, spm):
        metadata = gguf_metadata(spm)
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        words = oracle(spm).encode("the dog")
        types[words[0]] = 5
        tokens.append("")
        types.append(5)
        metadata["tokenizer.ggml.scores"].append(0.0)
        tokenizer = Tokenizer(tokenizer_from_gguf(metadata).tokenizer_json)
        ids = tokenizer.encode("the dog", add_special_tokens=False)
        assert words[0] not in ids
        assert tokenizer.decode(ids) == "the dog"
        assert tokenizer.vocab_size == len(tokens)

    def test_ends_of_a_turn_are_found_by_key_and_by_name(self, spm):
        turn = oracle(spm).piece_to_id("<turn|>")
        assert eos_token_ids(gguf_metadata(spm)) == (2, turn)
        assert eos_token_ids(gguf_metadata(spm, **{"tokenizer.ggml.eot_token_id": 5})) == (2, 5, turn)

    def test_sampling_defaults(self, spm):
        keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "tokenizer.chat_template": "{{ messages }}"}
        assets = tokenizer_from_gguf(gguf_metadata(spm, **keys))
        assert assets.generation_config["temperature"] == 0.6
        assert assets.generation_config["top_k"] == 20
        assert assets.chat_template == "{{ messages }}"


BYTES = sorted(_BYTE_ALPHABET)


def byte_level_metadata(pre: str | None = "gpt-2", **overrides: Any) -> dict[str, Any]:
    """All bytes, a few merges, one token of each special kind."""
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ġ Ġ"]
    tokens = [*BYTES, *(m.replace(" ", "") for m in merges), "<|end|>", "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    metadata.update(overrides)
    return {key: value for key, value in metadata.items() if value is not None}


class TestByteLevelMetadata:
    def test_special_tokens(self):
        tokenizer = Tokenizer(tokenizer_from_gguf(byte_level_metadata()).tokenizer_json)
        end, tool = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<tool>")
        ids = tokenizer.encode("a<tool><|end|> the")
        assert ids == [*tokenizer.encode("a"), tool, end, tokenizer.token_to_id("Ġthe")]
        assert tokenizer.decode(ids) == "a<tool> the"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool><|end|> the"

    @pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
    def test_every_pre_tokenizer_keeps_the_text(self, pre):
        assets = tokenizer_from_gguf(byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": False}))
        tokenizer = Tokenizer(assets.tokenizer_json)
        for name, text in HARD_TEXTS.items():
            if PRE_TOKENIZERS[pre].nfc and name in ("combining marks",):
                continue
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_missing_pre_means_default(self):
        missing, default = (tokenizer_from_gguf(byte_level_metadata(pre)) for pre in (None, "default"))
        assert missing == default

    @pytest.mark.parametrize(("pre", "add_bos"), [("gpt-2", False), ("llama-bpe", True), ("tekken", True)])
    def test_default_of_add_bos_depends_on_pre(self, pre, add_bos):
        assert tokenizer_from_gguf(byte_level_metadata(pre)).add_bos is add_bos


MALFORMED = {
    "no model": {"tokenizer.ggml.model": None},
    "model of the wrong type": {"tokenizer.ggml.model": 7},
    "no tokens": {"tokenizer.ggml.tokens": None},
    "tokens empty": {"tokenizer.ggml.tokens": []},
    "tokens not an array": {"tokenizer.ggml.tokens": "abc"},
    "token not a string": {"tokenizer.ggml.tokens": [1, 2, 3]},
    "tokens repeat": {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]},
    "types too short": {"tokenizer.ggml.token_type": [1]},
    "type out of range": {"tokenizer.ggml.token_type": [9] * 264},
    "no merges": {"tokenizer.ggml.merges": None},
    "merge without space": {"tokenizer.ggml.merges": ["the"]},
    "merge of unknown tokens": {"tokenizer.ggml.merges": ["xx yy"]},
    "merge into an unknown token": {"tokenizer.ggml.merges": ["x y"]},
    "bos out of range": {"tokenizer.ggml.bos_token_id": 100_000},
    "bos not a number": {"tokenizer.ggml.bos_token_id": "<s>"},
    "add_bos without bos": {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
    "add_bos not a flag": {"tokenizer.ggml.add_bos_token": 1},
    "template not a string": {"tokenizer.chat_template": 5},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_byte_level_metadata(name):
    with pytest.raises(CheckpointError, match=r"^GGUF metadata: "):
        tokenizer_from_gguf(byte_level_metadata(**MALFORMED[name]))


@pytest.mark.parametrize(
    "overrides",
    [
        {"tokenizer.ggml.scores": None},
        {"tokenizer.ggml.scores": [0.0]},
        {"tokenizer.ggml.scores": ["x"] * 480},
        {"tokenizer.ggml.scores": [float("nan")] * 480},
    ],
)
def test_malformed_scores(spm, overrides):
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores"):
        tokenizer_from_gguf(gguf_metadata(spm, **overrides))


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "something-new"])
def test_other_kinds_of_tokenizer_are_unsupported(model):
    with pytest.raises(UnsupportedModel, match=f"{model}.*gpt2.*llama"):
        tokenizer_from_gguf(byte_level_metadata(**{"tokenizer.ggml.model": model}))


def test_unknown_pre_tokenizer_names_the_known_ones():
    with pytest.raises(UnsupportedModel, match=r"'brand-new'.*llama-bpe.*qwen2"):
        tokenizer_from_gguf(byte_level_metadata("brand-new"))


ODD_VALUES = (
    None,
    True,
    -1,
    10**12,
    0.5,
    "",
    "x",
    [],
    [1],
    ["a"],
    [None],
    [[]],
    b"",
    {},
    np.array([]),
    np.zeros((2, 2)),
)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_odd_values_of_any_key_are_typed_errors_or_harmless(spm, kind):
    sound = byte_level_metadata() if kind == "gpt2" else gguf_metadata(spm)
    keys = [*sound, "tokenizer.ggml.add_bos_token", "tokenizer.ggml.unknown_token_id", "tokenizer.chat_template"]
    for key in keys:
        for value in ODD_VALUES:
            try:
                assets = tokenizer_from_gguf({**sound, key: value})
            except (CheckpointError, UnsupportedModel) as error:
                assert "GGUF metadata" in str(error), (key, value)  # noqa: PT017 - either outcome is fine
            else:
                assert Tokenizer(assets.tokenizer_json).decode([70, 71]), (key, value)
