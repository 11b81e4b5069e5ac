"""`PrefixAffinity`: which replica a request had best go to."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any


class PrefixAffinity:
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam: https://arxiv.org/abs/1608.01350), on
    rendezvous hashing.

    Every key has an order of its own of all replicas, by a hash of both. A request goes to the first replica in the
    order of its key that has room: so requests with one prefix meet on one replica, whose cache has it; where they are
    too many they spill to the second one, then the third, each of which gets the prefix once. A replica that comes or
    goes moves no keys between others.

    Args:
        load_bound: a replica has room while its load is at most this multiple of the mean, > 1.
        free_load: and in any case up to this load, which it hardly feels, ≥ 1.
    """

    def __init__(self, load_bound: float = 1.25, free_load: int = 4, seed: int | None = None) -> None:
        if load_bound <= 1:
            raise ValueError(f"load_bound must be above 1, got {load_bound}")
        if free_load < 1:
            raise ValueError(f"free_load must be at least 1, got {free_load}")
        self._load_bound, self._free_load = load_bound, free_load
        self._random = random.Random(seed)

    def bound(self, loads: Mapping[str, int]) -> int:
        """Most requests of one replica, the one that is being placed included."""
        mean = (sum(loads.values()) + 1) / len(loads)
        return max(self._free_load, math.ceil(self._load_bound * mean))

    def order(self, key: str | None, loads: Mapping[str, int]) -> list[str]:
        """All replicas, the best one first.

        Args:
            key: what requests with a common prefix have in common; None = any replica is as good.
            loads: replica -> requests in flight there.
        """
        if not loads:
            return []
        replicas = list(loads)
        if key is None:
            self._random.shuffle(replicas)
            return sorted(replicas, key=loads.__getitem__)
        bound = self.bound(loads)
        replicas.sort(key=lambda replica: (_weight(key, replica), replica), reverse=True)
        with_room = [replica for replica in replicas if loads[replica] < bound]
        full = [replica for replica in replicas if loads[replica] >= bound]
        return with_room + sorted(full, key=loads.__getitem__)


def _weight(key: str, replica: str) -> bytes:
    return hashlib.blake2b(replica.encode(), key=hashlib.blake2b(key.encode(), digest_size=32).digest()).digest()


def routing_key(body: bytes, prefix_chars: int) -> str | None:
    """What requests with a common prefix have in common: their model, salt, and the first characters of their prompt.

    Of a conversation that is its tools, and its messages up to the first of the user: they are the same in each turn.

    Args:
        body: of a request to OpenAI's routes or Triton's generate.
        prefix_chars: how many characters count.

    Returns:
        None for a body without a prompt.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None  # which the server refuses in its own words
    if not isinstance(request, dict):
        return None
    text = _prompt_text(request)
    if not text:
        return None
    names = [request.get("model"), request.get("cache_salt")]
    return json.dumps([*names, text[:prefix_chars]], default=str)


def _prompt_text(request: Mapping[str, Any]) -> str:
    messages = request.get("messages")
    if isinstance(messages, list):
        return _canonical([request.get("tools"), _opening(messages)])
    for name in ("prompt", "text_input", "input"):
        prompt = request.get(name)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]  # of several prompts the first one decides
        if prompt:
            return prompt if isinstance(prompt, str) else _canonical(prompt)
    return ""


def _opening(messages: Sequence[Any]) -> list[Any]:
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return list(messages[: index + 1])
    return list(messages)


def _canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
