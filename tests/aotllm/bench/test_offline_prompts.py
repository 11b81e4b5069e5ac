"""Prompts as token ids: exact lengths, seeds, shared beginnings, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotllm.bench.offline_prompts import OfflinePrompt, dataset_prompts, random_prompts
from aotllm.errors import InvalidRequest
from tests.aotllm.byte_tokenizer import byte_tokenizer

SHAPE: dict[str, Any] = {"vocab_size": 50, "input_len": 10, "output_len": 4, "seed": 7}


def test_lengths_are_exact_and_tokens_are_those_of_the_vocabulary():
    prompts = random_prompts(40, **SHAPE)
    assert {(len(prompt.token_ids), prompt.output_len, prompt.num_tokens) for prompt in prompts} == {(10, 4, 14)}
    assert {token for prompt in prompts for token in prompt.token_ids} == set(range(50))


def test_a_seed_makes_the_same_prompts_whatever_their_number():
    assert random_prompts(3, **SHAPE) == random_prompts(9, **SHAPE)[:3]
    assert random_prompts(3, **SHAPE) != random_prompts(3, **{**SHAPE, "seed": 8})
    assert len({prompt.token_ids for prompt in random_prompts(20, **SHAPE)}) == 20


def test_lengths_within_a_range():
    prompts = random_prompts(300, **SHAPE, range_ratio=0.5)
    assert {len(prompt.token_ids) for prompt in prompts} == set(range(5, 16))
    assert {prompt.output_len for prompt in prompts} == set(range(2, 7))
    assert min(len(prompt.token_ids) for prompt in random_prompts(300, **SHAPE, range_ratio=1.0)) == 1


def test_a_beginning_that_all_share_comes_before_the_own_tokens():
    prompts = random_prompts(5, **SHAPE, prefix_len=6)
    assert len({prompt.token_ids[:6] for prompt in prompts}) == 1
    assert [prompt.token_ids[6:] for prompt in prompts] == [p.token_ids for p in random_prompts(5, **SHAPE)]


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_the_prompts_of_a_file(tmp_path: Path):
    entries = [{"prompt": "a" * 3, "output_len": 2}, {"prompt": "b" * 4, "completion": "x" * 5}]
    file = write(tmp_path / "prompts.jsonl", *entries, {"prompt": "c" * 90})
    tokenizer = byte_tokenizer()
    prompts, left_out = dataset_prompts(file, 5, tokenizer, output_len=None, seed=0, max_seq_len=64)
    expected = {OfflinePrompt(tuple(tokenizer.encode(text)), length) for text, length in [("aaa", 2), ("bbbb", 5)]}
    assert (set(prompts), len(prompts), left_out) == (expected, 5, 1)
    assert prompts[0] == prompts[2] == prompts[4]
    assert {p.output_len for p in dataset_prompts(file, 2, tokenizer, output_len=9, seed=0, max_seq_len=64)[0]} == {9}


def test_a_file_of_which_nothing_fits(tmp_path: Path):
    file = write(tmp_path / "prompts.jsonl", {"prompt": "long" * 20})
    with pytest.raises(InvalidRequest, match="no entry that fits in 16 tokens") as caught:
        dataset_prompts(file, 5, byte_tokenizer(), output_len=None, seed=0, max_seq_len=16)
    assert caught.value.param == "dataset"
