"""How an answer ended, in the words of the OpenAI API."""

from __future__ import annotations

from typing import Any

from aotllm.request import SequenceOutput, TokenOutput


def finish_fields(output: TokenOutput | SequenceOutput) -> dict[str, Any]:
    """`finish_reason` and `stop_reason` of a choice.

    Clients know the reasons of OpenAI only. An answer whose time was over is one that was cut, so it says length, and
    `stop_reason` tells it from the others.
    """
    if output.finish_reason == "timeout":
        return {"finish_reason": "length", "stop_reason": "timeout"}
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
