"""What the stress tests of the manager share: tiny engines, every kind of request, and when an executor is idle."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.request import RequestOutput
from aotllm.structured_outputs import StructuredOutputs
from tests.integration.engines import build_engine, save_tiny_model
from tests.integration.test_architectures import CASES
from tests.integration.test_lora import save_adapter

TEXT = [int(token) for token in np.random.default_rng(3).integers(33, 127, 300)]
FORMS = [
    StructuredOutputs(regex="[a-c]{1,20}"),
    StructuredOutputs(choice=["abc", "abd", "xyz"]),
    StructuredOutputs(regex="a[0-9]{3}bcd(ef){3,8}"),  # most of it is forced
]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100]  # about the blocks of 16 tokens


class Models:
    """Engines that are built once, by name, and adapters of the one called llama."""

    def __init__(self, folder: Path) -> None:
        model = save_tiny_model(folder / "llama model", *CASES["llama, odd sizes"])
        save_tiny_model(folder / "window model", *CASES["gemma3"])
        self.adapters = {name: folder / name for name in ("a", "b")}
        for seed, path in enumerate(self.adapters.values()):
            save_adapter(path, model, seed, r=4, lora_alpha=8).unload()
        self._engines = {
            "llama": build_engine(folder / "llama model", folder / "llama", max_seq_len=256),
            "llama, int8 cache": build_engine(
                folder / "llama model", folder / "int8", max_seq_len=256, kv_cache_dtype="int8"
            ),
            "gemma3, windows": build_engine(folder / "window model", folder / "window", max_seq_len=256),
        }

    def engine(self, name: str) -> Engine:
        return self._engines[name]

    @contextmanager
    def start(self, name: str, **options: Any) -> Iterator[Executor]:
        """A new executor; "llama" has its adapters. It must end as idle as it began."""
        with Executor(self._engines[name], num_threads=2, **options) as executor:
            for adapter, folder in self.adapters.items() if name == "llama" else ():
                executor.load_lora(adapter, folder)
            yield executor
            assert_idle(executor)


def assert_idle(executor: Executor) -> None:
    """Nothing runs, waits or holds a block any more. Cancellations may still be on their way: small requests that come
    behind them pass the time."""
    end = time.monotonic() + 60
    while True:
        executor.submit(ask(TEXT[:1], max_tokens=1, priority=-(2**31))).result(60)
        stats = executor.stats()
        if (stats.running, stats.queued, stats.blocks_used) == (0, 0, 0) or time.monotonic() > end:
            break
    assert (stats.running, stats.queued, stats.blocks_used) == (0, 0, 0)
    assert stats.counters["failed"] == 0
    assert executor.alive


def ask(prompt: list[int], **fields: Any) -> Request:
    """Fields of `Request` and of `SamplingParams` side by side; greedy unless told otherwise."""
    names = {
        "structured_outputs",
        "priority",
        "timeout",
        "adapter",
        "cache_salt",
        "return_logits",
        "retention_priority",
    }
    options = {name: fields.pop(name) for name in names & fields.keys()}
    sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields}
    return Request(prompt_token_ids=prompt, sampling=SamplingParams(**sampling), **options)


def any_request(seed: int, adapters: bool) -> Request:
    """Every feature, alone and with others. The same seed gives the same request, and so the same answer."""
    draw = random.Random(seed)
    start = draw.choice([0, 0, 16, 33])
    fields: dict[str, Any] = {
        "max_tokens": draw.choice([1, 2, 15, 16, 17, 40, 120]),
        "temperature": draw.choice([0.0, 1.0]),
        "seed": seed,
        "ignore_eos": draw.random() < 0.5,
    }
    chances: list[tuple[float, Callable[[], dict[str, Any]]]] = [
        (0.3, lambda: {"n": draw.randrange(1, 6)}),
        (0.2, lambda: {"prompt_logprobs": draw.randrange(4)}),
        (0.2, lambda: {"logprobs": draw.randrange(4)}),
        (0.1, lambda: {"best_of": 7}),
        (0.2, lambda: {"stop": ("a", "b")}),
        (0.2, lambda: {"min_tokens": min(3, fields["max_tokens"])}),
        (0.1, lambda: {"logit_bias": {97: 100.0, 98: -100.0}}),
        (0.25, lambda: {"structured_outputs": draw.choice(FORMS)}),
        (0.25 if adapters else 0.0, lambda: {"adapter": draw.choice("ab")}),
        (0.2, lambda: {"priority": draw.randrange(-2, 3)}),
        (0.1, lambda: {"cache_salt": "salt"}),
    ]
    for chance, option in chances:
        if draw.random() < chance:
            fields |= option()
    return ask(TEXT[start : start + draw.choice(LENGTHS)], **fields)


def answer(result: RequestOutput) -> object:
    """All that may not depend on anything but the request."""
    return [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in result.outputs
    ], result.prompt_logprobs
