"""Body of `/v1/responses`: OpenAI's fields, and the sampling fields of the other endpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from pydantic import ConfigDict, Field, create_model, model_validator

from aotllm.errors import InvalidRequest
from aotllm.parameters import parameters
from aotllm.request import Request
from aotllm.sampling_params import SamplingParams
from aotllm.serving.openai.protocol import REQUEST_FIELDS, generated_fields
from aotllm.serving.openai.structured_outputs import StructuredFields
from aotllm.structured_outputs import StructuredOutputs

Messages = list[dict[str, Any]]

_OWN_FORM = ("max_tokens", "n", "best_of", "logprobs", "prompt_logprobs")
"""Sampling fields that are spelled otherwise here, or make no sense for one answer"""

_LOGPROBS = "message.output_text.logprobs"


_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "logprobs": "top_logprobs"}


@contextmanager
def own_names() -> Iterator[None]:
    """Errors name the fields of this endpoint, not those of the request that is made from them."""
    try:
        yield
    except InvalidRequest as error:
        name = _NAMES.get(error.param or "")
        if name is not None and error.param is not None:
            error.args = (error.message.replace(error.param, name),)
            error.param = name
        raise


class _Responses(StructuredFields):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: str | list[dict[str, Any]] = Field(description="A text, or messages with text parts.")
    instructions: str | None = Field(None, description="A system message in front of all others, of this answer only.")
    max_output_tokens: int | None = Field(None, description="Most tokens of the answer.")
    text: dict[str, Any] = Field(default_factory=dict, description="format: text, json_object, or json_schema.")
    stream: bool = False
    store: bool = Field(True, description="Keep the answer, so that a later request can go on from it.")
    previous_response_id: str | None = Field(None, description="Go on from the conversation of this answer.")
    metadata: dict[str, str] = Field(default_factory=dict, description="Comes back with the answer.")
    user: str | None = Field(None, description="Comes back with the answer.")
    top_logprobs: int | None = Field(None, description="Report this many most likely tokens; see include.")
    include: list[str] = Field(default_factory=list, description=f"{_LOGPROBS}; others mean nothing here.")

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The engine's `defaults` with what the client set. Raises InvalidRequest; it names the parameter."""
        given = {name: getattr(self, name) for name, _, _ in parameters(SamplingParams) if name not in _OWN_FORM}
        given["max_tokens"] = self.max_output_tokens
        given["logprobs"] = (self.top_logprobs or 0) if self.wants_logprobs else None
        given["n"] = 1
        with own_names():
            return defaults.replace(**{name: value for name, value in given.items() if value is not None})

    @property
    def wants_logprobs(self) -> bool:
        """Tokens come with their log-probabilities."""
        return _LOGPROBS in self.include or self.top_logprobs is not None

    def request_options(self) -> dict[str, Any]:
        """Keyword arguments of `Request` that the client set, besides prompt and sampling."""
        given = {name: getattr(self, name) for name in REQUEST_FIELDS}
        return {name: value for name, value in given.items() if value is not None}

    def form(self) -> StructuredOutputs | None:
        """What the answer is to look like, by `text.format` or a field of the other endpoints.

        Raises:
            InvalidRequest: unknown or contradictory; names the field.
        """
        described = self.text.get("format")
        other = super().form()
        form = _text_format(described)
        if form is not None and other is not None:
            raise InvalidRequest(f"text.format and {other.param} contradict each other; give one of them", other.param)
        return form or other

    def messages(self) -> Messages:
        """The messages of `input`, with text contents. Raises InvalidRequest for other items and parts."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidRequest("input must be a text or a list of at least one message, got []", "input")
        return [_message(item, index) for index, item in enumerate(self.input)]

    def check_supported(self) -> None:
        """Raises InvalidRequest for a field that would change the answer and is not implemented, and for one that could
        not come back with the answer."""
        for name in ("metadata", "text", "user"):
            _check_can_be_sent(name, getattr(self, name))
        extra = self.model_extra or {}
        for name, harmless in _UNSUPPORTED.items():
            if name in extra and not harmless(extra[name]):
                raise InvalidRequest(
                    f"{name}={extra[name]!r:.60} is not supported by /v1/responses; leave it out", name
                )


def _check_can_be_sent(name: str, value: Any) -> None:
    # JSON that came in may hold more than what can go out, or to another process.
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError):  # half a surrogate pair is a ValueError, too
        raise InvalidRequest(
            f"{name} holds half of a surrogate pair, a number that is not finite, or an integer of more than 64 bits",
            name,
        ) from None


def _text_format(described: Any) -> StructuredOutputs | None:
    if described is None:
        return None
    kind = described.get("type") if isinstance(described, Mapping) else described
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True, param="text.format")
    if kind == "json_schema" and described.get("schema") is not None:
        return StructuredOutputs(json=described["schema"], param="text.format")
    if kind == "json_schema":
        raise InvalidRequest(
            'text.format needs a schema: {"type": "json_schema", "name": ..., "schema": ...}', "text.format"
        )
    raise InvalidRequest(f"text.format.type must be text, json_object or json_schema, got {kind!r:.60}", "text.format")


def _message(item: dict[str, Any], index: int) -> dict[str, Any]:
    where = f"input[{index}]"
    kind = item.get("type", "message")
    if kind != "message":
        raise InvalidRequest(f"{where} is of type {kind!r:.60}; only messages are supported", "input")
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequest(f"{where}.role must be user, assistant, system or developer, got {role!r:.60}", "input")
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(part, where) for part in content)
    if not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts, got {content!r:.60}", "input")
    # Chat templates know no developer: it is OpenAI's newer word for system.
    return {"role": "system" if role == "developer" else role, "content": content}


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(
        f"{where}.content has a part of type {kind!r:.60}; only input_text and output_text with a text are supported",
        "input",
    )


_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value in ("auto", "none"),  # without tools they say the same
    "background": lambda value: value is False,
    "truncation": lambda value: value == "disabled",
    "n": lambda value: value == 1,
    **dict.fromkeys(
        ("conversation", "prompt", "max_tokens", "use_beam_search", "prompt_logprobs"), lambda value: False
    ),
}
"""Field -> is this value without effect. Anything else is refused; null is the same as leaving the field out."""


_ResponsesFields: Any = create_model(
    "_ResponsesFields",
    __base__=_Responses,
    **generated_fields(SamplingParams, lambda name: name not in _OWN_FORM),
    **generated_fields(Request, lambda name: name in REQUEST_FIELDS),
)


class ResponsesRequest(_ResponsesFields):  # type: ignore[misc]
    """Body of `/v1/responses`."""
