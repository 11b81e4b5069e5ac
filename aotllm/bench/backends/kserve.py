"""Names that the tensors of a language model have in TensorRT-LLM's ensemble, for both KServe protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotllm.bench.backends.base import RequestSettings
from aotllm.bench.conversation import Message, plain_text
from aotllm.bench.record import RequestRecord

DEFAULT_MODEL = "ensemble"


def inputs_of(messages: Sequence[Message], max_tokens: int, settings: RequestSettings) -> dict[str, Any]:
    """Tensor name → its one value."""
    inputs: dict[str, Any] = {"text_input": plain_text(messages), "max_tokens": max_tokens, "stream": True}
    if settings.temperature is not None:
        inputs["temperature"] = settings.temperature
    if settings.ignore_eos:
        inputs["min_tokens"] = max_tokens  # there is no ignore_eos; so many tokens must come
    if settings.count_tokens:
        inputs["return_num_input_tokens"] = inputs["return_num_output_tokens"] = True
    return inputs | dict(settings.extra_body)


class TokenCounts:
    """Counts of the responses to one request: `num_output_tokens` is that of a response alone, as TensorRT-LLM has it,
    so that inter-token latencies are exact whatever a response carries."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._total = 0

    def response(self, now: float, text: str, num_input_tokens: int | None, num_output_tokens: int | None) -> None:
        """One response has come."""
        self._record.usage(num_input_tokens, None, None)
        if num_output_tokens is None:
            self._record.chunk(now, text)
            return
        self._total += num_output_tokens
        self._record.chunk(now, text, total_tokens=self._total)

    def finish(self, now: float) -> None:
        """The answer is complete."""
        self._record.finished = now
