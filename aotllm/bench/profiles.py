"""Profiles: kinds of traffic, by lengths and turns; the texts are random words."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from aotllm.bench.conversation import Conversation, Turn
from aotllm.bench.words import Words


@dataclass(frozen=True)
class Profile:
    """Lengths in tokens. Those of a request are uniform in [(1 − spread) · len, (1 + spread) · len], at least 1."""

    input_len: int
    """New text of each turn"""
    output_len: int
    turns: int = 1
    prefix_len: int = 0
    """System prompt, the same for all conversations"""
    spread: float = 0.0
    """0 … 1"""

    def most_tokens(self) -> int:
        """Of the longest conversation, without what the chat template adds."""
        turn = self.longest(self.input_len) + self.longest(self.output_len)
        return self.prefix_len + self.turns * turn

    def longest(self, length: int) -> int:
        """The largest length that is drawn."""
        return max(1, round(length * (1 + self.spread)))

    def draw(self, length: int, rng: random.Random) -> int:
        """One length."""
        return rng.randint(max(1, round(length * (1 - self.spread))), self.longest(length))


PROFILES = {
    # A program that asks short questions: classify, extract, answer in a sentence.
    "api": Profile(input_len=128, output_len=48, spread=0.5),
    # Retrieved passages behind a common instruction, and a short answer from them.
    "rag": Profile(input_len=1536, output_len=96, prefix_len=64, spread=0.25),
    # A long system prompt with tools that all share; each turn adds a tool's result, and is answered by the next call.
    "agent": Profile(input_len=160, output_len=64, turns=6, prefix_len=1024, spread=0.5),
    # People who chat.
    "multi-turn": Profile(input_len=64, output_len=128, turns=5, spread=0.5),
    # Fixed lengths, given by flags.
    "random": Profile(input_len=1024, output_len=128),
}


def profile_of(
    name: str,
    *,
    input_len: int | None = None,
    output_len: int | None = None,
    turns: int | None = None,
    prefix_len: int | None = None,
    range_ratio: float | None = None,
) -> Profile:
    """The profile of that name with the given figures in place of its own."""
    given = {
        "input_len": input_len,
        "output_len": output_len,
        "turns": turns,
        "prefix_len": prefix_len,
        "spread": range_ratio,
    }
    return replace(PROFILES[name], **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]


class ProfileConversations:
    """Conversation `i` of a profile, for any i; the same for the same seed, whatever was asked for before."""

    def __init__(self, profile: Profile, words: Words, seed: int) -> None:
        self._profile, self._words, self._seed = profile, words, seed
        self._system = words.text(profile.prefix_len, random.Random(f"{seed}:system")) if profile.prefix_len else ""

    def __getitem__(self, index: int) -> Conversation:
        rng = random.Random(f"{self._seed}:{index}")  # a string: seeded by its digest, alike on all machines
        profile = self._profile
        turns = []
        for _ in range(profile.turns):
            length = profile.draw(profile.input_len, rng)
            turns.append(Turn(self._words.text(length, rng), length, profile.draw(profile.output_len, rng)))
        return Conversation(tuple(turns), self._system, profile.prefix_len)
