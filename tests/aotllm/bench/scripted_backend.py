"""A server that emits chunks at known times of a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aotllm.bench.backends.base import RequestSettings
from aotllm.bench.conversation import Message
from aotllm.bench.record import RequestFailed, RequestRecord
from tests.aotllm.bench.virtual_time import clock


@dataclass
class Script:
    """One answer: seconds after the request at which each chunk comes."""

    chunks: Sequence[float]
    prompt_tokens: int = 10
    cached_tokens: int | None = None
    text: str = "x"
    failure: RequestFailed | None = None
    """Raised after the chunks"""
    ends: float | None = None
    """Seconds after the request; None = with the last chunk"""


@dataclass
class ScriptedBackend:
    """Request number → its script. `asked` has (time, messages, max_tokens) of each."""

    script: Callable[[int], Script]
    name: str = "scripted"
    asked: list[tuple[float, list[Message], int]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    async def generate(
        self, messages: Sequence[Message], max_tokens: int, settings: RequestSettings, record: RequestRecord
    ) -> None:
        script = self.script(len(self.asked))
        start = clock()
        self.asked.append((start, list(messages), max_tokens))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            for at in script.chunks:
                await asyncio.sleep(start + at - clock())
                record.chunk(clock(), script.text)
            if script.failure is not None:
                raise script.failure
            record.finished = clock()
            record.usage(script.prompt_tokens, len(script.chunks), script.cached_tokens)
            if script.ends is not None:
                await asyncio.sleep(start + script.ends - clock())
        finally:
            self.under_way -= 1

    async def close(self) -> None:
        pass


SETTINGS = RequestSettings("m")
