"""Tools for models whose chat template does not know of them: described in words, called in plain JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from aotllm.serving.openai.tools.definitions import ToolUse

_TOOLS_IN_TAG = re.compile(r"\{[%{](?:(?![%}]\}).)*\btools\b", re.DOTALL)

_INTRODUCTION = "You can call functions. They are, as JSON:"
_FORM = 'To call one, answer with {"name": <name of the function>, "parameters": <object of its arguments>}'
_HOW = {
    "auto": f"{_FORM} and nothing else. Call one only where it helps; otherwise answer as usual.",
    "required": "Answer with a JSON list of the calls that help, each "
    '{"name": <name of the function>, "parameters": <object of its arguments>}.',
    "named": "Answer with the JSON object of the arguments for the function %s.",
}


@lru_cache(maxsize=64)
def knows_tools(chat_template: str | None) -> bool:
    """Whether a template shows tools to the model: it mentions the variable within a tag."""
    return _TOOLS_IN_TAG.search(chat_template or "") is not None


def described_in_words(
    messages: Sequence[Mapping[str, Any]], use: ToolUse | None, chat_template: str | None
) -> list[dict[str, Any]]:
    """The conversation with the tools, earlier calls and their results as texts that any template can show."""
    plain = _with_results_of_users(messages)
    if use is None:
        return plain
    how = _HOW[use.mode] % use.allowed[0] if use.mode == "named" else _HOW[use.mode]
    described = [json.dumps(function.tool()["function"], ensure_ascii=False) for function in use.functions]
    text = "\n".join([_INTRODUCTION, *described, how])
    first = plain[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *plain[1:]]
    if first["role"] == "user" and "system role not supported" in (chat_template or "").lower():
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _with_results_of_users(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results come from the user; those of several calls in one message, since templates want roles to alternate."""
    plain: list[dict[str, Any]] = []
    previous = ""
    for message in messages:
        if message["role"] == "tool":
            text = f"Result of {message.get('name', 'the function')}: {message['content']}"
            if previous == "tool":
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        else:
            plain.append(_with_written_calls(message))
        previous = message["role"]
    return plain


def _with_written_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        json.dumps({"name": call["function"]["name"], "parameters": call["function"]["arguments"]}, ensure_ascii=False)
        for call in message["tool_calls"]
    ]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join([*filter(None, [message["content"]]), *calls])}
