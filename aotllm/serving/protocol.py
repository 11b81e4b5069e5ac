"""Request bodies of the OpenAI API: pydantic models, with the sampling fields taken from `SamplingParams`.

Unknown fields are accepted and ignored, as OpenAI's clients expect. Fields that are known, that change the answer, and
that this server does not implement are refused by name (`UNSUPPORTED`), never silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from aotllm.errors import InvalidRequest
from aotllm.parameters import ParameterSpec, parameters
from aotllm.sampling_params import SamplingParams

MAX_CHOICES = 128
MAX_PROMPTS = 1024

_ENDPOINT_FIELDS = ("logprobs", "max_tokens")
"""Sampling fields whose form in the API differs by endpoint"""


class StreamOptions(BaseModel):
    """What a stream tells besides the text."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Common(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Answers per prompt.")
    max_tokens: int | None = Field(None, description="Most tokens per answer.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    def sampling(self, defaults: SamplingParams, **changes: Any) -> SamplingParams:
        """The engine's `defaults` with what the client set.

        Raises:
            InvalidRequest: out of range; names the parameter.
        """
        given = {name: getattr(self, name) for name, _, _ in parameters(SamplingParams) if name not in _ENDPOINT_FIELDS}
        given |= changes
        return defaults.replace(**{name: value for name, value in given.items() if value is not None})

    def check_supported(self) -> None:
        """Raises InvalidRequest for a field that would change the answer and is not implemented."""
        extra = self.model_extra or {}
        for name, harmless in UNSUPPORTED.items():
            if name in extra and not harmless(extra[name]):
                raise InvalidRequest(
                    f"{name}={extra[name]!r:.60} is not supported by this server; leave {name} out", name
                )
        if extra.get("best_of") not in (None, self.n):
            raise InvalidRequest(
                f"best_of={extra['best_of']!r:.60} is not supported by this server unless it is n", "best_of"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is for streams; set stream to true, or leave it out", "stream_options")


def _pydantic_type(spec: ParameterSpec) -> Any:
    # Ranges are checked by SamplingParams itself, so that all entrances give the same message.
    kind: Any = spec.kind
    if spec.many:
        kind = kind | list[kind]
    return kind | None


_SAMPLING_FIELDS: Any = {
    name: (_pydantic_type(spec), Field(None, description=f"{spec.doc} Allowed: {spec.allowed}."))
    for name, _, spec in parameters(SamplingParams)
    if name not in _ENDPOINT_FIELDS
}
_SampledRequest: Any = create_model("_SampledRequest", __base__=_Common, **_SAMPLING_FIELDS)


class CompletionRequest(_SampledRequest):  # type: ignore[misc]
    """Body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, description="Report this many most likely tokens.")
    echo: bool = False
    add_special_tokens: bool = Field(True, description="Begin a text prompt with the tokenizer's BOS token, if any.")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or many, each a text or token ids. Raises InvalidRequest for none or too many."""
        prompts: list[Any] = [self.prompt]
        if isinstance(self.prompt, list) and (not self.prompt or not isinstance(self.prompt[0], int)):
            prompts = self.prompt
        if not 1 <= len(prompts) <= MAX_PROMPTS or any(prompt == [] for prompt in prompts):
            raise InvalidRequest(
                f"prompt must hold 1 to {MAX_PROMPTS} prompts, none of them an empty list; got {len(prompts)}", "prompt"
            )
        return prompts


class ChatCompletionRequest(_SampledRequest):  # type: ignore[misc]
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="Report this many most likely tokens.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def num_top_logprobs(self) -> int | None:
        """`SamplingParams.logprobs` for this request. Raises InvalidRequest for top_logprobs without logprobs."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def plain_messages(self) -> list[dict[str, Any]]:
        """Messages with text contents: parts of type "text" are joined. Raises InvalidRequest for other parts."""
        return [_plain_message(message, index) for index, message in enumerate(self.messages)]


def _plain_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where}.role must be a string, got {message.get('role')!r:.60}", "messages")
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "".join(_part_text(part, where) for part in content)}
    if content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts, got {content!r:.60}", "messages")
    return {**message, "content": content or ""}


def _part_text(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise InvalidRequest(f"{where}.content has a part of type {kind!r:.60}; only text parts are supported", "messages")


def _is_text_format(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "text"


def _off(value: Any) -> bool:
    return value is False


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), lambda value: value == 0),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), lambda value: value == 1),
    **dict.fromkeys(("logit_bias", "bad_words", "functions"), lambda value: not value),
    **dict.fromkeys(("tool_choice", "function_call"), lambda value: value == "none"),
    **dict.fromkeys(
        (
            "tools",
            "allowed_token_ids",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "grammar",
            "json_schema",
            "logits_processors",
            "prompt_logprobs",
            "truncate_prompt_tokens",
            "web_search_options",
            "audio",
        ),
        lambda value: False,
    ),
    **dict.fromkeys(("use_beam_search", "continue_final_message", "chat_template", "suffix", "echo"), _off),
    "add_generation_prompt": lambda value: value is True,
    "add_special_tokens": _off,  # of chat: the template adds them
    "modalities": lambda value: value == ["text"],
    "response_format": _is_text_format,
}
"""Field -> is this value without effect. Anything else is refused; null is the same as leaving the field out."""
