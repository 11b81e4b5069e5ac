"""Request bodies of the OpenAI API: pydantic models, with the sampling fields taken from `SamplingParams`.

Unknown fields are accepted and ignored, as OpenAI's clients expect. Fields that are known, that change the answer, and
that this server does not implement are refused by name (`UNSUPPORTED`), never silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from aotllm.beam_search import BeamSearchParams
from aotllm.errors import InvalidRequest
from aotllm.parameters import ParameterSpec, parameters
from aotllm.request import Request
from aotllm.sampling_params import SamplingParams
from aotllm.serving.openai.structured_outputs import StructuredFields

_ENDPOINT_FIELDS = ("logprobs", "max_tokens")
"""Sampling fields whose form in the API differs by endpoint"""

REQUEST_FIELDS = ("priority", "timeout", "cache_salt", "retention_priority", "truncate_prompt_tokens")
"""Fields of `Request` that clients may set; the adapter is chosen by the model's name"""


class StreamOptions(BaseModel):
    """What a stream tells besides the text."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Common(StructuredFields):
    model_config = ConfigDict(extra="allow", defer_build=True)

    model: str | None = None
    max_tokens: int | None = Field(None, description="Most tokens per answer.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    use_beam_search: bool = Field(False, description="Search for the most likely answers instead of drawing.")
    early_stopping: bool | str | None = Field(None, description="When beam search ends: true, false, or never.")

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

    def request_options(self) -> dict[str, Any]:
        """Keyword arguments of `Request` that the client set, besides prompt and sampling."""
        given = {name: getattr(self, name) for name in REQUEST_FIELDS}
        return {name: value for name, value in given.items() if value is not None}

    def beam_search(self, sampling: SamplingParams) -> BeamSearchParams | None:
        """How to search, or None for ordinary generation. There are n beams unless the client says otherwise.

        Raises:
            InvalidRequest: parameters of beam search without it, or a stream of it; names the parameter.
        """
        given = {name: getattr(self, name) for name, _, _ in parameters(BeamSearchParams)}
        given = {name: value for name, value in given.items() if value is not None}
        if not self.use_beam_search:
            for name, value in given.items():
                if value != _WITHOUT_BEAMS[name]:
                    raise InvalidRequest(f"{name} is for beam search; set use_beam_search to true", name)
            return None
        if self.stream:
            raise InvalidRequest("beam search cannot stream: its answers are known at the end only", "stream")
        return BeamSearchParams(**{"beam_width": sampling.n, **given})

    def check_supported(self) -> None:
        """Raises InvalidRequest for a field that would change the answer and is not implemented."""
        extra = self.model_extra or {}
        for name, harmless in UNSUPPORTED.items():
            if name in extra and not harmless(extra[name]):
                what_to_do = _SUCCESSORS.get(name, f"leave {name} out")
                raise InvalidRequest(f"{name}={extra[name]!r:.60} is not supported by this server; {what_to_do}", name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is for streams; set stream to true, or leave it out", "stream_options")
        if self.stream and getattr(self, "prompt_logprobs", None) is not None:
            raise InvalidRequest("prompt_logprobs do not come in a stream; leave one of them out", "prompt_logprobs")


def _pydantic_type(spec: ParameterSpec) -> Any:
    # Ranges are checked by SamplingParams itself, so that all entrances give the same message.
    kind: Any = spec.kind
    if spec.key is not None:
        kind = dict[str, kind]
    if spec.many:
        kind = kind | list[kind]
    return kind | None


def generated_fields(schema: type, names: Callable[[str], bool]) -> Any:
    """Pydantic fields, all of them optional, for the declared parameters of a dataclass whose names are wanted."""
    return {
        name: (_pydantic_type(spec), Field(None, description=f"{spec.doc} Allowed: {spec.allowed}."))
        for name, _, spec in parameters(schema)
        if names(name)
    }


_SampledRequest: Any = create_model(
    "_SampledRequest",
    __base__=_Common,
    **generated_fields(SamplingParams, lambda name: name not in _ENDPOINT_FIELDS),
    **generated_fields(Request, lambda name: name in REQUEST_FIELDS),
    **generated_fields(BeamSearchParams, lambda name: name not in _Common.model_fields),
)

_WITHOUT_BEAMS = {"beam_width": 1, "length_penalty": 1, "early_stopping": False}
"""Values that mean nothing where there is no beam search"""


class CompletionRequest(_SampledRequest):  # type: ignore[misc]
    """Body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, description="Report this many most likely tokens.")
    echo: bool = False
    add_special_tokens: bool = Field(True, description="Begin a text prompt with the tokenizer's BOS token, if any.")
    return_tokens_as_token_ids: bool = Field(False, description="Tokens in logprobs are shown as token_id:ID.")
    return_token_ids: bool = Field(False, description="Choices have token_ids, and prompt_token_ids at their start.")

    @property
    def scores_only(self) -> bool:
        """Nothing is generated: the prompt's log-probabilities are wanted."""
        return bool(self.max_tokens == 0)

    def tokens_to_generate(self, default: int) -> int:
        """`SamplingParams.max_tokens` for this request. Raises InvalidRequest for 0 where no prompt is scored."""
        if self.scores_only and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens must be at least 1, or 0 with echo or prompt_logprobs", "max_tokens")
        if self.scores_only:
            return 1
        return default if self.max_tokens is None else self.max_tokens

    def num_prompt_logprobs(self) -> int | None:
        """`SamplingParams.prompt_logprobs` for this request: those of the client's own, and of the echoed prompt."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)

    def prompts(self, most: int) -> list[str | list[int]]:
        """The prompts, one or many, each a text or token ids. Raises InvalidRequest for none or more than `most`."""
        prompts: list[Any] = [self.prompt]
        if isinstance(self.prompt, list) and (not self.prompt or not isinstance(self.prompt[0], int)):
            prompts = self.prompt
        if not 1 <= len(prompts) <= most or any(prompt == [] for prompt in prompts):
            raise InvalidRequest(
                f"prompt must hold 1 to {most} prompts, none of them an empty list; got {len(prompts)}", "prompt"
            )
        return prompts


class ChatCompletionRequest(_SampledRequest):  # type: ignore[misc]
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="Report this many most likely tokens.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, or the function to call; default auto where there are tools."
    )
    parallel_tool_calls: bool = Field(True, description="Allow several calls in one answer.")
    include_reasoning: bool = Field(True, description="Send the reasoning of models that mark it.")
    documents: list[dict[str, Any]] | None = Field(None, description="For chat templates that show documents.")
    add_generation_prompt: bool = Field(True, description="End the prompt with the opening of the assistant's turn.")
    continue_final_message: bool = Field(
        False, description="Go on with the last message; needs add_generation_prompt to be false."
    )
    echo: bool = Field(False, description="Begin the answer with the last message, where it is the same role's.")
    chat_template: str | None = Field(None, description="A Jinja template; only where the server trusts its clients.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further variables of the chat template, such as enable_thinking."
    )

    def num_top_logprobs(self) -> int | None:
        """`SamplingParams.logprobs` for this request. Raises InvalidRequest for top_logprobs without logprobs."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def _off(value: Any) -> bool:
    return value is False


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "functions": lambda value: not value,
    **dict.fromkeys(("tool_choice", "function_call"), lambda value: value == "none"),
    **dict.fromkeys(
        (
            "tools",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "grammar",
            "json_schema",
            "logits_processors",
            "web_search_options",
            "prompt_embeds",
            "audio",
        ),
        lambda value: False,
    ),
    **dict.fromkeys(("continue_final_message", "chat_template", "echo"), _off),
    "suffix": lambda value: not value,
    "add_generation_prompt": lambda value: value is True,
    "add_special_tokens": _off,  # of chat: the template adds them
    "modalities": lambda value: value == ["text"],
}
"""Field -> is this value without effect. Anything else is refused; null is the same as leaving the field out."""

_SUCCESSORS = {
    "functions": 'send them as tools, {"type": "function", "function": {...}} each',
    "function_call": "send tools and tool_choice instead",
}
"""What to do about fields that the API itself has given up"""
