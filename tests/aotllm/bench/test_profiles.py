"""What is asked: lengths, words and their calibration, seeds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from aotllm.bench.profiles import PROFILES, Profile, ProfileConversations, profile_of
from aotllm.bench.words import COMMON_WORDS, Words, words_of_tokenizer, words_of_usage


@pytest.mark.parametrize("name", PROFILES)
def test_lengths_stay_in_their_range(name: str):
    profile = PROFILES[name]
    conversations = ProfileConversations(profile, Words(), seed=3)
    for index in range(50):
        conversation = conversations[index]
        assert len(conversation.turns) == profile.turns
        assert len(conversation.system.split()) == conversation.system_len == profile.prefix_len
        for turn in conversation.turns:
            assert len(turn.text.split()) == turn.input_len
            assert abs(turn.input_len - profile.input_len) <= profile.spread * profile.input_len + 0.5
            assert abs(turn.output_len - profile.output_len) <= profile.spread * profile.output_len + 0.5
        used = conversation.system_len + sum(turn.input_len + turn.output_len for turn in conversation.turns)
        assert used <= profile.most_tokens()


def test_conversations_are_those_of_the_seed_in_whatever_order():
    profile = PROFILES["agent"]
    forward = [ProfileConversations(profile, Words(), 1)[i] for i in range(5)]
    conversations = ProfileConversations(profile, Words(), 1)
    assert [conversations[i] for i in reversed(range(5))] == forward[::-1]
    assert ProfileConversations(profile, Words(), 2)[0] != forward[0]


def test_agents_share_a_system_prompt_and_nothing_else():
    conversations = ProfileConversations(PROFILES["agent"], Words(), 0)
    assert conversations[0].system == conversations[1].system
    assert conversations[0].turns[0].text != conversations[1].turns[0].text


def test_figures_of_a_profile_can_be_given():
    assert profile_of("random", input_len=5, output_len=6, turns=2, prefix_len=7, range_ratio=0.5) == Profile(
        5, 6, 2, 7, 0.5
    )
    assert profile_of("api") == PROFILES["api"]
    assert profile_of("agent", prefix_len=0).prefix_len == 0


def by_letters(single: Callable[[str], bool]) -> Callable[[str], Awaitable[int]]:
    """A tokenizer that has one token for some words, and else one per letter."""

    async def count(text: str) -> int:
        return sum(1 if single(word) else len(word) for word in text.split())

    return count


def test_a_tokenizer_chooses_the_words_that_are_one_token():
    words = asyncio.run(words_of_tokenizer(by_letters(lambda word: word[0] != "s"), "told"))
    assert set(words.words) == {word for word in COMMON_WORDS if word[0] != "s"}
    assert (words.tokens_per_word, words.origin) == (1.0, "told")


def test_the_choice_needs_few_questions():
    asked = 0
    tokenizer = by_letters(lambda word: word not in ("sea", "vowel"))

    async def count(text: str) -> int:
        nonlocal asked
        asked += 1
        return await tokenizer(text)

    asyncio.run(words_of_tokenizer(count, ""))
    assert asked < 100


def test_a_tokenizer_of_letters_has_an_average():
    words = asyncio.run(words_of_tokenizer(by_letters(lambda word: False), ""))
    letters = sum(map(len, COMMON_WORDS)) / len(COMMON_WORDS)
    assert words.tokens_per_word == pytest.approx(letters)
    text = words.text(1000, random.Random(0))
    assert len(text.replace(" ", "")) == pytest.approx(1000, rel=0.1)


def test_a_servers_usage_tells_the_average_without_its_chat_template():
    async def prompt_tokens(text: str) -> int:
        return 37 + 2 * len(text.split())

    assert asyncio.run(words_of_usage(prompt_tokens)).tokens_per_word == 2.0


def test_without_any_count_a_word_is_a_token():
    async def silent(text: str) -> None:
        return None

    assert asyncio.run(words_of_usage(silent)) == Words()
