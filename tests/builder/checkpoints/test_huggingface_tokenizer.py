"""Tokenizers of Hugging Face folders: which file wins, and that ids are those of transformers and sentencepiece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from aotllm.builder.checkpoints.huggingface_tokenizer import tokenizer_from_folder
from aotllm.errors import CheckpointError
from aotllm.tokenization import Tokenizer
from tests.tokenizer_models import oracle, train_sentencepiece
from tests.tokenizer_texts import HARD_TEXTS

BOS, EOS = 256, 257


def tokenizer_json(bos: bool = False) -> str:
    raw = RawTokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<bos>", "<eos>"])
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return raw.to_str(pretty=True)


def write(folder: Path, **files: Any) -> Path:
    """`files` by name without the dot: tokenizer_json → tokenizer.json. Objects become JSON."""
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        data = content if isinstance(content, (str, bytes)) else json.dumps(content)
        (folder / f"{stem}.{suffix}").write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


CONFIG = {"bos_token": "<bos>", "eos_token": "<eos>"}


class TestTokenizerJson:
    @pytest.mark.parametrize("bos", [False, True])
    def test_is_kept_byte_for_byte(self, tmp_path, bos):
        text = tokenizer_json(bos)
        assets = tokenizer_from_folder(write(tmp_path, tokenizer_json=text, tokenizer_config_json=CONFIG))
        assert assets.tokenizer_json == text
        assert (assets.bos_token, assets.eos_token, assets.add_bos) == ("<bos>", "<eos>", bos)

    @pytest.mark.parametrize("bos", [False, True])
    @pytest.mark.parametrize("flag", [False, True])
    def test_ids_equal_transformers_whatever_the_flags_say(self, tmp_path, bos, flag):
        config = {**CONFIG, "add_bos_token": flag, "add_eos_token": flag, "tokenizer_class": "PreTrainedTokenizerFast"}
        folder = write(tmp_path, tokenizer_json=tokenizer_json(bos), tokenizer_config_json=config)
        reference = transformers.AutoTokenizer.from_pretrained(folder)
        assets = tokenizer_from_folder(folder)
        for text in HARD_TEXTS.values():
            assert Tokenizer(assets.tokenizer_json).encode(text) == reference.encode(text)
        assert assets.add_bos == bos

    @pytest.mark.parametrize(
        "files",
        [
            {"tokenizer_config_json": CONFIG},
            {"tokenizer_config_json": {name: {"content": token, "lstrip": False} for name, token in CONFIG.items()}},
            {"special_tokens_map_json": CONFIG},
            {
                "special_tokens_map_json": {"bos_token": {"content": "<bos>"}},
                "tokenizer_config_json": {"eos_token": "<eos>"},
            },
            {"generation_config_json": {"bos_token_id": BOS, "eos_token_id": EOS}},
            {"generation_config_json": {"bos_token_id": BOS, "eos_token_id": [EOS, BOS]}},
        ],
    )
    def test_where_bos_and_eos_come_from(self, tmp_path, files):
        assets = tokenizer_from_folder(write(tmp_path, tokenizer_json=tokenizer_json(), **files))
        assert (assets.bos_token, assets.eos_token) == ("<bos>", "<eos>")

    def test_wins_over_tokenizer_model(self, tmp_path):
        text = tokenizer_json()
        folder = write(tmp_path, tokenizer_json=text, tokenizer_model=b"junk")
        assert tokenizer_from_folder(folder).tokenizer_json == text

    def test_generation_config_is_passed_on(self, tmp_path):
        generation = {"temperature": 0.6, "eos_token_id": [EOS], "_from_model_config": True}
        folder = write(tmp_path, tokenizer_json=tokenizer_json(), generation_config_json=generation)
        assert tokenizer_from_folder(folder).generation_config == generation


class TestChatTemplate:
    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({}, None),
            ({"tokenizer_config_json": {"chat_template": "inline"}}, "inline"),
            ({"chat_template_jinja": "file", "tokenizer_config_json": {"chat_template": "inline"}}, "file"),
            ({"chat_template_json": {"chat_template": "json"}}, "json"),
            (
                {"chat_template_json": {"chat_template": "json"}, "tokenizer_config_json": {"chat_template": "inline"}},
                "inline",
            ),
            (
                {
                    "tokenizer_config_json": {
                        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
                    }
                },
                "d",
            ),
        ],
    )
    def test_which_one_wins(self, tmp_path, files, expected):
        assert (
            tokenizer_from_folder(write(tmp_path, tokenizer_json=tokenizer_json(), **files)).chat_template == expected
        )


class TestTokenizerModel:
    def test_ids_equal_sentencepiece(self, tmp_path):
        model = train_sentencepiece()
        assets = tokenizer_from_folder(write(tmp_path, tokenizer_model=model))
        assert (assets.bos_token, assets.eos_token, assets.add_bos) == ("<s>", "</s>", True)
        tokenizer = Tokenizer(assets.tokenizer_json)
        for text in HARD_TEXTS.values():
            assert tokenizer.encode(text) == [1, *oracle(model).encode(text)]

    @pytest.mark.parametrize(("add_bos", "add_eos"), [(False, False), (True, True), (False, True)])
    def test_flags(self, tmp_path, add_bos, add_eos):
        config = {"add_bos_token": add_bos, "add_eos_token": add_eos}
        assets = tokenizer_from_folder(
            write(tmp_path, tokenizer_model=train_sentencepiece(), tokenizer_config_json=config)
        )
        assert Tokenizer(assets.tokenizer_json).encode("") == [1] * add_bos + [2] * add_eos

    def test_ids_equal_transformers(self, tmp_path):
        """Its own conversion drops the dummy prefix of texts that start with a space, which SentencePiece does not."""
        config = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "bos_token": "<s>", "eos_token": "</s>"}
        folder = write(tmp_path, tokenizer_model=train_sentencepiece(), tokenizer_config_json=config)
        reference = transformers.AutoTokenizer.from_pretrained(folder, add_bos_token=True)
        tokenizer = Tokenizer(tokenizer_from_folder(folder).tokenizer_json)
        for text in HARD_TEXTS.values():
            if not text.startswith((" ", "▁")):
                assert tokenizer.encode(text) == reference.encode(text)

    @pytest.mark.parametrize("where", ["added_tokens.json", "tokenizer_config.json"])
    def test_added_tokens_extend_the_vocabulary(self, tmp_path, where):
        model = train_sentencepiece()
        size = oracle(model).vocab_size()
        if where == "added_tokens.json":
            files = {"added_tokens_json": {"<|im_end|>": size + 1, "<|im_start|>": size}}
        else:
            entries = {str(size): {"content": "<|im_start|>", "special": True}, str(size + 1): "<|im_end|>"}
            files = {"tokenizer_config_json": {"added_tokens_decoder": entries}}
        tokenizer = Tokenizer(tokenizer_from_folder(write(tmp_path, tokenizer_model=model, **files)).tokenizer_json)
        hello = oracle(model).encode("hello")
        assert tokenizer.encode("<|im_start|>hello<|im_end|>") == [1, size, *hello, size + 1]
        assert tokenizer.decode([size, *hello, size + 1]) == "hello"

    def test_added_tokens_with_a_gap_belong_to_another_model(self, tmp_path):
        folder = write(tmp_path, tokenizer_model=train_sentencepiece(), added_tokens_json={"<x>": 10_000})
        with pytest.raises(CheckpointError, match="10000"):
            tokenizer_from_folder(folder)


MALFORMED = {
    "tokenizer.json is not JSON": {"tokenizer_json": "{"},
    "tokenizer.json is another thing": {"tokenizer_json": {"version": "1.0"}},
    "tokenizer.json is not UTF-8": {"tokenizer_json": b"\xff\xfe"},
    "tokenizer.model is damaged": {"tokenizer_model": b"\x0a\xff"},
    "config is not JSON": {"tokenizer_config_json": "{'bos': 1}"},
    "config is no object": {"tokenizer_config_json": [1]},
    "config nests without end": {"tokenizer_config_json": "[" * 200_000},
    "bos is a number": {"tokenizer_config_json": {"bos_token": 5}},
    "add_bos is a string": {
        "tokenizer_model": train_sentencepiece(),
        "tokenizer_config_json": {"add_bos_token": "yes"},
    },
    "bos is no token": {"tokenizer_model": train_sentencepiece(), "tokenizer_config_json": {"bos_token": "<none>"}},
    "template is a number": {"tokenizer_config_json": {"chat_template": 5}},
    "templates without default": {"tokenizer_config_json": {"chat_template": [{"name": "rag", "template": ""}]}},
    "generation config is not JSON": {"generation_config_json": ""},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_folders(tmp_path, name):
    files = MALFORMED[name]
    if not files.keys() & {"tokenizer_json", "tokenizer_model"}:
        files = {"tokenizer_json": tokenizer_json(), **files}
    with pytest.raises(CheckpointError):
        tokenizer_from_folder(write(tmp_path, **files))


def test_a_folder_without_tokenizer_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json and tokenizer\.model"):
        tokenizer_from_folder(tmp_path)
