"""`Request`, and what comes back for it: `TokenOutput` step by step, `RequestOutput` at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aotllm.errors import InvalidRequest
from aotllm.parameters import ParameterSpec
from aotllm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]
"""stop: an end token, stop token or stop string; length: max_tokens or the context is full; cancelled: by the owner,
by a consumer that went away, or by shutdown. A failure is no finish reason: it is raised."""

Message = Mapping[str, Any]
"""One chat message, `{"role": ..., "content": ...}`; other keys reach the chat template as they are."""


_PRIORITY = ParameterSpec("Order of admission.", int, low=-(2**31), high=2**31 - 1)


@dataclass(frozen=True)
class Request:
    """What to generate from. Exactly one of `prompt`, `prompt_token_ids` and `messages` is given.

    Raises:
        InvalidRequest: none or several of the three, an empty one, or a priority out of range.
    """

    prompt: str | None = None
    """Plain text, without chat template; special tokens of the tokenizer (BOS) are added"""
    prompt_token_ids: Sequence[int] | None = None
    """Token ids, taken as they are"""
    messages: Sequence[Message] | None = None
    """A conversation, rendered with the engine's chat template"""
    sampling: SamplingParams | None = None
    """None = the engine's own defaults"""
    add_special_tokens: bool = True
    """Of `prompt` only: a template adds its own special tokens"""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Of `messages` only: extra variables for the chat template, for example `enable_thinking`"""
    priority: int = 0
    """A higher one is admitted first and preempted last; −2³¹ … 2³¹−1"""
    return_logits: bool = False
    """Attach the raw logits row, float32 `[vocab_size]`, of each generated token"""

    def __post_init__(self) -> None:
        given = {"prompt": self.prompt, "prompt_token_ids": self.prompt_token_ids, "messages": self.messages}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            got = " and ".join(names) or "none"
            raise InvalidRequest(f"a request needs exactly one of prompt, prompt_token_ids and messages, got {got}")
        name = names[0]
        if name != "prompt" and len(given[name] or ()) == 0:
            raise InvalidRequest(f"{name} must not be empty", name)
        _PRIORITY.check("priority", self.priority)


Promptlike = Request | str | Sequence[int]
"""What `Executor.generate` takes: a request, plain text, or token ids."""


def as_request(prompt: Promptlike, sampling: SamplingParams | None = None) -> Request:
    """`prompt` as a `Request`; `sampling` fills in where the request has none."""
    if isinstance(prompt, str):
        return Request(prompt=prompt, sampling=sampling)
    if isinstance(prompt, Request):
        if prompt.sampling is not None or sampling is None:
            return prompt
        return replace(prompt, sampling=sampling)
    return Request(prompt_token_ids=prompt, sampling=sampling)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probabilities at one generated token, of the raw logits (before temperature and filters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, most likely first"""


@dataclass(frozen=True)
class TokenOutput:
    """What one step added to a request."""

    text: str
    """New text. May be empty: the bytes of a character may be incomplete, or the start of a stop string held back"""
    token_ids: tuple[int, ...]
    """New tokens, one or more; empty only in the last output of a cancelled request"""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token where asked for"""
    logits: tuple[Any, ...] = ()
    """One float32 `[vocab_size]` array per token where asked for"""
    finish_reason: FinishReason | None = None
    """Set in the last output, and only there"""
    stop_reason: str | int | None = None
    """The stop string or stop token that matched; None for the model's own end token"""


@dataclass(frozen=True)
class Timings:
    """Seconds, by the monotonic clock, from the moment of `submit`."""

    first_token_seconds: float | None
    """Until the first token: queue and prompt. None where there was none"""
    total_seconds: float
    """Until the end"""

    @property
    def generation_seconds(self) -> float:
        """From the first token to the end."""
        return self.total_seconds - self.first_token_seconds if self.first_token_seconds is not None else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """A finished request."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    """All generated tokens, with the end token or the tokens of the stop string, though their text is hidden"""
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache"""
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    logits: tuple[Any, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def tokens_per_second(self) -> float | None:
        """Generation speed after the first token; None for fewer than two tokens."""
        steps = len(self.token_ids) - 1
        seconds = self.timings.generation_seconds
        return steps / seconds if steps > 0 and seconds > 0 else None
