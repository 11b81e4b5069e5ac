"""Texts for tests on real models: of many kinds, made from a seed, so that n-grams of some occur again and of others do
not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

NAMES = ("Ada", "Brahe", "Curie", "Dirac", "Euler", "Fermi", "Gauss", "Hopper", "Ibn Sina", "Joule")
THINGS = ("lamp", "kettle", "bicycle", "violin", "ladder", "compass", "teapot", "anchor", "mirror", "saddle")
PLACES = ("harbour", "station", "library", "orchard", "bakery", "lighthouse", "market", "mill", "chapel", "bridge")
OPENINGS = (
    "The sea was calm that night, and",
    "Water boils at a lower temperature on mountains because",
    "Dear committee, I am writing to you since",
    "In the year 2084 nobody remembered why",
    "To make bread you need",
)


def _count(rng: random.Random) -> str:
    start, step = rng.randint(0, 40), rng.randint(1, 9)
    return ", ".join(str(start + i * step) for i in range(8)) + ","


def _records(rng: random.Random) -> str:
    rows = [{"name": rng.choice(NAMES), "item": rng.choice(THINGS), "count": rng.randint(1, 99)} for _ in range(3)]
    return "\n".join(map(json.dumps, rows)) + "\n"


def _code(rng: random.Random) -> str:
    first, second = rng.sample(THINGS, 2)
    return (
        f"class {rng.choice(PLACES).title()}:\n    def __init__(self, {first}, {second}):\n"
        f"        self.{first} = {first}\n        self.{second} = {second}\n\n"
        f"    def get_{first}(self):\n        return self.{first}\n\n    def get_"
    )


def _echo(rng: random.Random) -> str:
    line = f"{rng.choice(NAMES)} sold the {rng.choice(THINGS)} at the {rng.choice(PLACES)}."
    return f"Original: {line}\nCopy: {line}\nOriginal: {line}\nCopy:"


def _table(rng: random.Random) -> str:
    rows = "\n".join(f"| {rng.choice(THINGS)} | {rng.randint(1, 9)} |" for _ in range(3))
    return f"| item | count |\n|---|---|\n{rows}\n|"


def _dialogue(rng: random.Random) -> str:
    a, b = rng.sample(NAMES, 2)
    return f"{a}: Where is my {rng.choice(THINGS)}?\n{b}: In the {rng.choice(PLACES)}.\n{a}: Are you sure?\n{b}:"


def _prose(rng: random.Random) -> str:
    return f"{rng.choice(OPENINGS)} {rng.choice(NAMES)} of the {rng.choice(PLACES)}"


def _noise(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghij \n0123é中") for _ in range(30))


KINDS: dict[str, Callable[[random.Random], str]] = {
    "count": _count,
    "records": _records,
    "code": _code,
    "echo": _echo,
    "table": _table,
    "dialogue": _dialogue,
    "prose": _prose,
    "noise": _noise,
}


def varied_prompts(count: int, seed: int = 0) -> list[str]:
    """Different prompts of 10 to 100 tokens; the kinds take turns."""
    rng = random.Random(seed)
    makers = list(KINDS.values())
    prompts = [makers[i % len(makers)](rng) for i in range(2 * count)]
    different = list(dict.fromkeys(prompts))[:count]
    assert len(different) == count
    return different
