"""`Request`, and what comes back for it: `TokenOutput` step by step, `RequestOutput` at the end."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from aotllm.errors import InvalidRequest
from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter
from aotllm.sampling_params import SamplingParams
from aotllm.structured_outputs import StructuredOutputs

Pooling = Literal["last", "mean"]
"""Which of the prompt's hidden states after the final norm make its embedding: last: the last token's, which knows all
others; mean: the mean of all"""

FinishReason = Literal["stop", "length", "timeout", "cancelled"]
"""stop: an end token, stop token or stop string, or the end of a prompt to embed; length: max_tokens or the context is
full; timeout: the request's time is over; cancelled: by the owner, by a consumer that went away, or by shutdown. All of
them keep what was generated. A failure is no finish reason: it is raised."""

MAX_TIMEOUT = 1e6
"""Seconds; eleven days"""

Message = Mapping[str, Any]
"""One chat message, `{"role": ..., "content": ...}`; other keys reach the chat template as they are."""


@documented
@dataclass(frozen=True)
class Request:
    """What to generate from. Exactly one of `prompt`, `prompt_token_ids` and `messages` is given.

    Raises:
        InvalidRequest: none or several of the three, an empty one, or a value out of range.
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
    tools: Sequence[Mapping[str, Any]] | None = None
    """Of `messages` only: what the chat template tells the model of, `{"type": "function", "function": {...}}` each"""
    add_generation_prompt: bool = True
    """Of `messages` only: end the prompt with the opening of the assistant's turn"""
    continue_final_message: bool = False
    """Of `messages` only: leave the last message open, so that the answer goes on with it; needs
    `add_generation_prompt=False`"""
    chat_template: str | None = None
    """Of `messages` only: a Jinja template instead of the engine's"""
    shown_special_tokens: Sequence[str] = ()
    """Special tokens whose text is shown although `skip_special_tokens` is on, for those who look for it in answers;
    texts that are no token of the vocabulary have no effect"""
    structured_outputs: StructuredOutputs | None = None
    """A form that the answer keeps to: JSON schema, regular expression, choice or grammar"""
    priority: int = parameter(
        0, ParameterSpec("A higher one is admitted first and preempted last.", int, low=-(2**31), high=2**31 - 1)
    )
    return_logits: bool = False
    """Attach the raw logits row, float32 `[vocab_size]`, of each generated token"""
    timeout: float | None = parameter(
        None,
        ParameterSpec(
            "Seconds from submission until the request ends with what it has; None = as the executor is configured.",
            float,
            low=0.0,
            low_open=True,
            high=MAX_TIMEOUT,
            optional=True,
        ),
    )
    cache_salt: str | None = parameter(
        None,
        ParameterSpec(
            "Share cached prefixes only with requests of an equal salt, so that nobody else can tell from response "
            "times what was asked; None = with all that have none.",
            str,
            optional=True,
        ),
    )
    retention_priority: int = parameter(
        35, ParameterSpec("Cached prefixes of a higher one are evicted later.", int, low=0, high=100)
    )
    truncate_prompt_tokens: int | None = parameter(
        None,
        ParameterSpec(
            "Keep this many tokens of the prompt, its last ones; -1 = what leaves room for max_tokens; None = all.",
            int,
            low=-1,
            high=2**31 - 1,
            optional=True,
        ),
    )
    adapter: str | None = parameter(
        None, ParameterSpec("LoRA adapter, by the name it was loaded with; None = the bare model.", str, optional=True)
    )

    pooling: Pooling | None = None
    """Generate nothing: the answer is `RequestOutput.embedding`. Not with what is for text, as `sampling` is"""

    def __post_init__(self) -> None:
        given = {"prompt": self.prompt, "prompt_token_ids": self.prompt_token_ids, "messages": self.messages}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            got = " and ".join(names) or "none"
            raise InvalidRequest(f"a request needs exactly one of prompt, prompt_token_ids and messages, got {got}")
        name = names[0]
        self._check_kind(name)
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt contradict each other; set one of them to false",
                "continue_final_message",
            )
        check_parameters(self)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 or at least 1, got 0: a prompt needs a token",
                "truncate_prompt_tokens",
            )
        if self.pooling is not None:
            self._check_pooling()

    def _check_kind(self, name: str) -> None:
        value = getattr(self, name)
        if name == "prompt":
            if not isinstance(value, str):
                raise InvalidRequest(f"prompt must be a string, got {value!r:.80}", name)
            return
        if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
            raise InvalidRequest(f"{name} must be a list, got {value!r:.80}", name)
        if len(value) == 0:
            raise InvalidRequest(f"{name} must not be empty", name)

    def _check_pooling(self) -> None:
        if self.pooling not in get_args(Pooling):
            allowed = ", ".join(get_args(Pooling))
            raise InvalidRequest(f"pooling must be one of {allowed}, or None, got {self.pooling!r:.80}", "pooling")
        for name in ("sampling", "structured_outputs", "return_logits"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is for generated text, and with pooling there is none", name)


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
    """Natural-log probabilities at one token, of the raw logits (before temperature and filters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, most likely first"""

    @classmethod
    def from_native(cls, native: Any) -> TokenLogprob:
        """From `_runtime.TokenLogprobs`."""
        return cls(native.token_id, native.logprob, tuple((int(t), float(p)) for t, p in native.top))


@dataclass(frozen=True)
class TokenOutput:
    """What one step added to one sequence of a request."""

    text: str
    """New text. May be empty: the bytes of a character may be incomplete, or the start of a stop string held back"""
    token_ids: tuple[int, ...]
    """New tokens, one or more; empty only in the last output of a cancelled or timed-out sequence"""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token where asked for"""
    logits: tuple[Any, ...] = ()
    """One float32 `[vocab_size]` array per token where asked for"""
    finish_reason: FinishReason | None = None
    """Set in the last output of a sequence, and only there"""
    stop_reason: str | int | None = None
    """The stop string or stop token that matched; None for the model's own end token"""
    index: int = 0
    """Which of the request's sequences, 0 … n−1"""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """In the first output of a sequence where asked for: one per prompt token from the second on"""


@dataclass(frozen=True)
class Timings:
    """Seconds, by the monotonic clock, from the moment of `submit`."""

    first_token_seconds: float | None
    """Until the first token: queue and prompt. None where there was none"""
    total_seconds: float
    """Until the end"""
    queue_seconds: float | None = None
    """Until the prompt began to be computed. None where it never was, or where it was not told"""

    @property
    def prefill_seconds(self) -> float | None:
        """From the queue's end to the first token: the prompt. None where either is not known."""
        if self.first_token_seconds is None or self.queue_seconds is None:
            return None
        return self.first_token_seconds - self.queue_seconds

    @property
    def generation_seconds(self) -> float:
        """From the first token to the end."""
        return self.total_seconds - self.first_token_seconds if self.first_token_seconds is not None else 0.0


@dataclass(frozen=True)
class SequenceOutput:
    """One answer of a finished request."""

    index: int
    """0 … n−1"""
    text: str
    token_ids: tuple[int, ...]
    """All generated tokens, with the end token or the tokens of the stop string, though their text is hidden"""
    finish_reason: FinishReason
    stop_reason: str | int | None
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    logits: tuple[Any, ...] = ()
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities where they are known: with `logprobs`, `best_of`, or beam search"""
    score: float | None = None
    """Of beam search only: cumulative_logprob / length ** length_penalty"""
    num_preemptions: int = 0
    """Times that the sequence gave its KV blocks up and was computed again"""
    num_draft_tokens: int = 0
    """Tokens that speculation proposed"""
    num_accepted_tokens: int = 0
    """Those of them that the model agreed with"""

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, by which best_of chooses; −inf where there is no token or it is not known."""
        if self.cumulative_logprob is None or not self.token_ids:
            return -math.inf
        return self.cumulative_logprob / len(self.token_ids)

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between tokens after the first one; None for fewer than two tokens."""
        steps = len(self.token_ids) - 1
        return self.timings.generation_seconds / steps if steps > 0 else None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `text`, `token_ids`, … are those of its first answer, the best one where there is a best."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache"""
    outputs: tuple[SequenceOutput, ...]
    """The n answers, by index; with best_of above n and in beam search best first"""
    timings: Timings
    """Of all answers together: to the first token of any, and to the end of the last"""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Where asked for: one per prompt token from the second on"""
    num_generated_tokens: int = 0
    """Of all answers, those that best_of left out included"""
    embedding: Any = field(default=None, compare=False)
    """With `pooling`: float32 `[hidden_size]` array, as the model gives it, not normalized. None else, and where the
    request ended before its prompt"""

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Of the first answer."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """Of the first answer."""
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the first answer."""
        return self.outputs[0].logprobs

    @property
    def logits(self) -> tuple[Any, ...]:
        """Of the first answer."""
        return self.outputs[0].logits

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_preemptions(self) -> int:
        """Of all answers."""
        return sum(output.num_preemptions for output in self.outputs)

    @property
    def draft_acceptance(self) -> float | None:
        """Share of the proposed tokens that the model agreed with, over all answers; None where none was proposed."""
        proposed = sum(output.num_draft_tokens for output in self.outputs)
        return sum(output.num_accepted_tokens for output in self.outputs) / proposed if proposed else None

    @property
    def tokens_per_second(self) -> float | None:
        """Generation speed of the first answer after its first token; None for fewer than two tokens."""
        seconds = self.outputs[0].seconds_per_token
        return 1 / seconds if seconds else None
