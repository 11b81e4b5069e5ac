"""`OfflinePrompt`: what an engine is asked in process, as token ids; random ones, or those of a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aotllm.bench.dataset import DatasetConversations, read_dataset
from aotllm.errors import InvalidRequest


@dataclass(frozen=True)
class OfflinePrompt:
    """One request."""

    token_ids: tuple[int, ...]
    output_len: int
    """`max_tokens`"""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together."""
        return len(self.token_ids) + self.output_len


class EncodesText(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Ids of a text."""


def random_prompts(
    count: int,
    *,
    vocab_size: int,
    input_len: int,
    output_len: int,
    seed: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
) -> list[OfflinePrompt]:
    """Prompts of random tokens; the same for the same seed, and the first ones the same for any count.

    Args:
        count: prompts.
        vocab_size: tokens are below it.
        input_len, output_len: lengths are uniform in [(1 − range_ratio) · len, (1 + range_ratio) · len], at least 1.
        seed: of tokens and lengths.
        range_ratio: 0 … 1.
        prefix_len: tokens at the beginning that all prompts share, before those of `input_len`.
    """
    prefix = _tokens(random.Random(f"{seed}:prefix"), prefix_len, vocab_size)
    prompts = []
    for index in range(count):
        rng = random.Random(f"{seed}:{index}")  # a string: seeded by its digest, alike on all machines
        own, answer = (_length(rng, length, range_ratio) for length in (input_len, output_len))
        prompts.append(OfflinePrompt(prefix + _tokens(rng, own, vocab_size), answer))
    return prompts


def dataset_prompts(
    path: Path, count: int, tokenizer: EncodesText, *, output_len: int | None, seed: int, max_seq_len: int
) -> tuple[list[OfflinePrompt], int]:
    """The first turns of a file's conversations in an order that the seed decides, from the start again when all were
    had; and how many entries were left out because they do not fit in `max_seq_len` tokens.

    Raises:
        InvalidRequest: as `read_dataset`, or nothing fits.
        OSError: the file cannot be read.
    """

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    found = read_dataset(path, count=num_tokens, output_len=output_len, multi_turn=False)
    order, prompts = DatasetConversations(found, seed), []
    for index in range(len(order)):
        conversation = order[index]
        turn = conversation.turns[0]
        text = f"{conversation.system}\n\n{turn.text}" if conversation.system else turn.text
        prompts.append(OfflinePrompt(tuple(tokenizer.encode(text)), turn.output_len))
    fitting = [prompt for prompt in prompts if prompt.token_ids and prompt.num_tokens <= max_seq_len]
    if not fitting:
        raise InvalidRequest(
            f"{path} has no entry that fits in {max_seq_len} tokens, prompt and answer together", "dataset"
        )
    return [fitting[index % len(fitting)] for index in range(count)], len(prompts) - len(fitting)


def _length(rng: random.Random, length: int, ratio: float) -> int:
    return rng.randint(max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio))))


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(int(rng.random() * vocab_size) for _ in range(count))  # an order faster than randrange
