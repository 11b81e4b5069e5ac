"""`ChatTemplate`: messages to a prompt, by the checkpoint's Jinja template.

A template is code from a stranger. It runs in Jinja's immutable sandbox, so it reaches nothing but its variables, and
with bounds on what it can loop over and build. The bounds stop accidents and the obvious bombs; they are no quota on
memory, which Python cannot set. The environment is the one that Hugging Face documents for chat templates:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aotllm.errors import InvalidRequest

MAX_OUTPUT_CHARS = 1 << 26
"""Longest prompt that a template may build"""
MAX_RANGE_ITEMS = 1_000_000
"""Sum of the lengths of all `range()`s of one rendering"""
MAX_SECONDS = 10.0
"""Longest rendering; looked at whenever the template writes"""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now, param: str | None = None) -> None:
        """Compile `source`. `now` is the clock behind the template's `strftime_now`; `param` names the field of the
        request that it came in, or None for the model's own. Raises InvalidRequest."""
        self._now = now
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        environment.globals.pop("lipsum", None)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            if param is not None:
                raise InvalidRequest(f"{param} does not compile: {error}", param) from None
            raise InvalidRequest(f"the model's chat template does not compile: {error}; use a raw prompt") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`.

        Args:
            messages: chat messages as the API takes them (`role`, `content`, …).
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end with the last message's content, without what closes its turn.
            tools: function schemas for templates that show them to the model.
            bos_token, eos_token: texts that templates insert.
            kwargs: further variables of the template (`documents`, `enable_thinking`, …).

        Raises:
            InvalidRequest: the messages are no list of objects, or the template refuses them; its own message is kept.
        """
        _check_messages(messages)
        mark = ""
        if continue_final_message:
            # Random, so that no text of a client can be taken for it; found again where the content ends.
            mark = f"END-{secrets.token_hex(16)}"
            messages = [*messages[:-1], _marked(messages[-1], mark)]
        variables = {
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": bos_token or "",
            "eos_token": eos_token or "",
            "range": _BoundedRange(MAX_RANGE_ITEMS),
        }
        try:
            prompt = self._run(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat template: {error.message or error}", "messages") from None
        except RecursionError:
            raise InvalidRequest("chat template: it recurses too deeply", "messages") from None
        except Exception as error:  # whatever a template's expressions can raise: TypeError, KeyError, …
            raise InvalidRequest(
                f"chat template: {type(error).__name__}: {error}; the messages may lack what the template expects",
                "messages",
            ) from None
        return _cut_at(prompt, mark) if mark else prompt

    def _run(self, variables: dict[str, Any]) -> str:
        deadline = time.monotonic() + MAX_SECONDS
        parts: list[str] = []
        size = 0
        for part in self._template.generate(variables):
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                raise SecurityError(f"the prompt is longer than {MAX_OUTPUT_CHARS} characters")
            if time.monotonic() > deadline:
                raise SecurityError(f"it ran for longer than {MAX_SECONDS:g} s")
            parts.append(part)
        return "".join(parts)

    def _strftime_now(self, pattern: str) -> str:
        return self._now().strftime(pattern)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, without the operators that turn a few characters of template into gigabytes."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_small(left) and _small(right)):
            raise SecurityError("** takes numbers up to 1000")
        if operator == "+" and _size(left) + _size(right) > MAX_OUTPUT_CHARS:
            raise SecurityError(f"+ builds more than {MAX_OUTPUT_CHARS} items")
        if operator == "*" and any(
            isinstance(count, int) and _size(items) * count > MAX_OUTPUT_CHARS
            for items, count in ((left, right), (right, left))
        ):
            raise SecurityError(f"* builds more than {MAX_OUTPUT_CHARS} items")
        if operator == "%" and isinstance(left, str) and _WIDE_FIELD.search(left):
            raise SecurityError(f"the format string {left!r} pads to more than 9999 characters")
        return super().call_binop(context, operator, left, right)


_WIDE_FIELD = re.compile(r"[0-9]{5}|\*")
"""In the pattern of `%`: a width that is huge, or given by an argument"""


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _small(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= 1000


class _BoundedRange:
    """`range` with a budget for one rendering, so that nested loops end."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def __call__(self, *args: int) -> range:
        items = range(*args)
        # len() overflows beyond the machine's word
        count = max(0, (items.stop - items.start + items.step - (1 if items.step > 0 else -1)) // items.step)
        self._budget -= count
        if self._budget < 0:
            raise SecurityError(f"it loops over more than {MAX_RANGE_ITEMS} items of range()")
        return items


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EXTENSIONS = ["jinja2.ext.loopcontrols", _GenerationTag]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or message.get("tool_calls"):
        raise InvalidRequest("continue_final_message needs a last message of text, without tool calls", "messages")
    return {**message, "content": content + mark}


def _cut_at(prompt: str, mark: str) -> str:
    at = prompt.rfind(mark)
    if at < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the content of the last message", "messages"
        )
    return prompt[:at]


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequest("messages must be a list of at least one message object", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"messages[{index}] is of type {type(message).__name__}, not an object with role and content",
                "messages",
            )
