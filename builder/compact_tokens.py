"""`tokenizer.tokens`: a byte-pair tokenizer in a form that is mapped instead of parsed (`docs/engine_format.md`).

A `tokenizer.json` of a few hundred thousand merges takes a second to load and some hundred MB. Most tokenizers of today
are BPE over words that a pattern cuts, or over whole texts; for these the file holds vocabulary and merges as tables,
beside a splitter: the same tokenizer with its added tokens and its pattern, but with no vocabulary. Others have no such
file, and are run by the library as ever.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import pre_tokenizers

from aotllm.engines.rank_file import RankFileWriter, TensorSpec
from aotllm.tokenization.byte_vocabulary import is_markup

_OF_MODEL, _SPECIAL, _MARKUP = 1, 2, 4
"""Flags, as in runtime_cpp/src/tokenization/compact_tokens.h"""
_FREE = 0xFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by, https://github.com/openai/gpt-2/blob/master/src/encoder.py"""
_WORD = "\x00word\x00"
"""The only token of a splitter's own vocabulary"""


class _Unsupported(Exception):
    """The tokenizer does something that the tables cannot."""


def write_compact_tokens(tokenizer_json: str, path: Path) -> bool:
    """Writes `path` where the tokenizer is of a kind that it can hold; returns whether it is."""
    record = json.loads(tokenizer_json)
    try:
        words = _words(record)
        splitter = _splitter(record)
        before, after = _frame(record.get("post_processor"))
    except _Unsupported:
        return False
    raw = RawTokenizer.from_str(tokenizer_json)
    added = [token["id"] for token in record["added_tokens"]]
    facts = {
        "added": [0, *added],
        "before": before,
        "after": after,
        "vocab_size": raw.get_vocab_size(with_added_tokens=True),
        "decoder": json.dumps(record["decoder"]),
    }
    tensors = {
        **_token_tables(record),
        **_merge_tables(record["model"]),
        "splitter": _bytes(json.dumps(splitter, ensure_ascii=False)),
        "facts": _bytes(json.dumps(facts)),
    }
    specs = {name: TensorSpec("U8", array.shape) for name, array in tensors.items()}
    with RankFileWriter(path, specs, words) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
        writer.close()
    return True


def _words(record: dict[str, Any]) -> dict[str, str]:
    """How a word is spelled and what it is made of. Raises _Unsupported."""
    model = record["model"]
    plain = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(name) for name in plain) or "" in model["vocab"]:
        raise _Unsupported
    if record.get("decoder") is None or any(not token["content"] for token in record["added_tokens"]):
        raise _Unsupported
    whole = "true" if model.get("ignore_merges") else "false"
    if _is_byte_level(record.get("pre_tokenizer")):
        complete = set(pre_tokenizers.ByteLevel.alphabet()) <= set(model["vocab"])
        if record.get("normalizer") is not None or not (complete or model.get("unk_token") is None):
            raise _Unsupported
        return {"words": "byte_level", "whole_words": whole}
    if not model.get("byte_fallback") or not {f"<0x{byte:02X}>" for byte in range(256)} <= set(model["vocab"]):
        raise _Unsupported  # characters without a token are dropped, or become an unknown one
    return {"words": "byte_fallback", "whole_words": whole, "space": _space(record.get("normalizer"))}


def _space(normalizer: dict[str, Any] | None) -> str:
    """What a normalizer that does nothing else writes for a space."""
    if normalizer is None:
        return " "
    if normalizer["type"] == "Sequence" and len(normalizer["normalizers"]) == 1:
        return _space(normalizer["normalizers"][0])
    # One character for one: places in the text stay what they are.
    if normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "} and len(normalizer["content"]) == 1:
        return str(normalizer["content"])
    raise _Unsupported


def _pre_tokenizers(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    return list(pre_tokenizer["pretokenizers"]) if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    return any(step["type"] == "ByteLevel" for step in _pre_tokenizers(pre_tokenizer))


def _splitter(record: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without its vocabulary: a word becomes token 0, the added tokens follow. Raises _Unsupported."""
    steps: list[dict[str, Any] | None] = []
    for step in _pre_tokenizers(record.get("pre_tokenizer")):
        if steps and steps[-1] is None:
            raise _Unsupported  # splits what is spelled in bytes
        if step["type"] in ("Split", "Digits"):
            steps.append(step)
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            if step.get("use_regex", True):
                pattern = {"Regex": _GPT2_WORDS}
                steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
            steps.append(None)
        else:
            raise _Unsupported
    splits = [step for step in steps if step is not None]
    return {
        "version": "1.0",
        "added_tokens": [{**token, "id": i} for i, token in enumerate(record["added_tokens"], 1)],
        "normalizer": record.get("normalizer"),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
        "model": {"type": "WordLevel", "vocab": {_WORD: 0}, "unk_token": _WORD},
    }


def _frame(processor: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """Ids before and after a text. Raises _Unsupported."""
    if processor is None or processor["type"] == "ByteLevel":
        return [], []
    if processor["type"] == "Sequence":
        before: list[int] = []
        after: list[int] = []
        for step in processor["processors"]:
            outer = _frame(step)
            before, after = outer[0] + before, after + outer[1]
        return before, after
    if processor["type"] != "TemplateProcessing":
        raise _Unsupported
    sides: tuple[list[int], list[int]] = ([], [])
    texts = 0
    for piece in processor["single"]:
        if "Sequence" in piece:
            texts += 1
        else:
            sides[texts > 0].extend(processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    if texts != 1:
        raise _Unsupported
    return sides


def _token_tables(record: dict[str, Any]) -> dict[str, npt.NDArray[np.uint8]]:
    vocab: dict[str, int] = record["model"]["vocab"]
    tokens = {i: token for token, i in vocab.items()}
    tokens.update((token["id"], token["content"]) for token in record["added_tokens"])
    size = max(tokens) + 1
    flags = np.zeros(size, np.uint8)
    flags[list(vocab.values())] = _OF_MODEL
    for token in record["added_tokens"]:
        flags[token["id"]] |= _SPECIAL * token["special"] + _MARKUP * is_markup(token["content"], token["special"])
    spelled = [tokens.get(i, "").encode() for i in range(size)]
    ids = np.array(sorted(tokens), np.uint32)
    hashes = np.array([zlib.crc32(spelled[i]) for i in ids], np.uint64)
    slots = _slots(len(ids))
    return {
        "offsets": _view(np.cumsum([0, *map(len, spelled)]).astype("<u4")),
        "text": np.frombuffer(b"".join(spelled), np.uint8),
        "flags": flags,
        "token_slots": _fill(hashes & np.uint64(slots - 1), ids, slots),
    }


def _merge_tables(model: dict[str, Any]) -> dict[str, npt.NDArray[np.uint8]]:
    vocab = model["vocab"]
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    merges = [(vocab[left], vocab[right], vocab[left + right]) for left, right in pairs]
    # Of merges that are there twice the last counts.
    last = {(left, right): rank for rank, (left, right, _) in enumerate(merges)}
    ranks = np.array(list(last.values()), np.uint32)
    table = np.array(merges, "<u4").reshape(-1, 3)
    slots = _slots(len(ranks))
    left, right = (table[ranks, side].astype(np.uint64) for side in (0, 1))
    hashes = ((left << np.uint64(32)) | right) * _GOLDEN >> np.uint64(64 - (slots.bit_length() - 1))
    return {"merges": _view(table), "merge_slots": _fill(hashes, ranks, slots)}


def _slots(count: int) -> int:
    """A power of two of which at most two thirds are used."""
    return max(2, 1 << (count * 3 // 2).bit_length())


def _fill(hashes: npt.NDArray[np.uint64], values: npt.NDArray[np.uint32], size: int) -> npt.NDArray[np.uint8]:
    """A table of open addressing, linear probing: all that look for a place take a step at a time."""
    table = np.full(size, _FREE, "<u4")
    places = hashes.astype(np.int64)
    while len(values):
        free = table[places] == _FREE
        table[places[free]] = values[free]  # of several the last one has it
        homeless = table[places] != values
        places, values = (places[homeless] + 1) % size, values[homeless]
    return _view(table)


def _view(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)
