"""Conversations as chat templates take them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.serving.openai.tools.schema_check import check_depth

_MISSING_CONTENT = re.compile(r"content['\"\])]*\s+is\s+(not\s+)?none")
"""A template that tells messages without content by it"""


def template_messages(messages: Sequence[Mapping[str, Any]], chat_template: str | None) -> list[dict[str, Any]]:
    """The messages of a request body in the form that Hugging Face's templates expect.

    Parts of type "text" are joined; arguments of calls become objects; keys without a value, which clients send along,
    are left out; a result of a tool gets the name of its function.

    Raises:
        InvalidRequest: malformed, or of a kind that is not supported.
    """
    template = chat_template or ""
    names: dict[str, str] = {}
    prepared = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str):
            raise _refuse(f"{where}.role must be a string, got {role!r:.60}")
        if role == "function" or message.get("function_call") is not None:
            raise _refuse(f"{where} is of the former API of functions; send tool_calls, and the role tool for results")
        plain = {key: value for key, value in message.items() if value is not None and key != "function_call"}
        plain["content"] = _content(message.get("content"), where)
        if role == "developer" and "developer" not in template:
            plain["role"] = "system"  # its former name, which templates know
        if role == "assistant":
            _prepare_assistant(plain, where, template, names)
        elif role == "tool" and "name" not in plain and plain.get("tool_call_id") in names:
            plain["name"] = names[plain["tool_call_id"]]
        prepared.append(plain)
    return prepared


def _prepare_assistant(message: dict[str, Any], where: str, template: str, names: dict[str, str]) -> None:
    # Two names are in use; templates know the older one.
    if "reasoning" in message:
        message.setdefault("reasoning_content", message["reasoning"])
    calls = message.pop("tool_calls", None)
    if not calls:
        if calls is not None and calls != []:
            raise _refuse(f"{where}.tool_calls must be a list of calls, got {calls!r:.60}")
        return
    if not isinstance(calls, list):
        raise _refuse(f"{where}.tool_calls must be a list of calls, got {calls!r:.60}")
    message["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    names.update((call["id"], call["function"]["name"]) for call in message["tool_calls"] if "id" in call)
    if not message["content"] and _tells_by_missing_content(template):
        message["content"] = None


@lru_cache(maxsize=64)
def _tells_by_missing_content(template: str) -> bool:
    return _MISSING_CONTENT.search(template) is not None


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise _refuse(
            f'{where} must be {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": ...}}}}, '
            f"got {call!r:.80}"
        )
    identity = call.get("id")
    if identity is not None and not isinstance(identity, str):
        raise _refuse(f"{where}.id must be a string, got {identity!r:.60}")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    known = {} if identity is None else {"id": identity}
    return {**known, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(value: Any, where: str) -> dict[str, Any]:
    if value in (None, ""):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError) as error:
            raise _refuse(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _refuse(f"{where} must be a JSON object as a string, got {value!r:.60}")
    check_depth(value, where, "messages")
    return value


def _content(content: Any, where: str) -> str:
    if isinstance(content, list):
        return "".join(_part_text(part, where) for part in content)
    if content is not None and not isinstance(content, str):
        raise _refuse(f"{where}.content must be a string or a list of parts, got {content!r:.60}")
    return content or ""


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    text = part.get("text" if kind == "text" else "refusal") if kind in ("text", "refusal") else None
    if isinstance(text, str):
        return text
    raise _refuse(f"{where}.content has a part of type {kind!r:.60}; only text parts are supported")


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(message, "messages")
