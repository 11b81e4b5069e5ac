"""`RequestPreparer`: from a `Request` to what the runtime takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aotllm.bad_words import bad_words_token_ids
from aotllm.errors import ContextTooLong, InvalidRequest
from aotllm.manager import ManagerRequest
from aotllm.output_assembler import OutputAssembler
from aotllm.request import Request
from aotllm.sampling_params import SamplingParams
from aotllm.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from aotllm.tokenization import Tokenizer

_RESERVED_TEMPLATE_NAMES = {
    "messages",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "add_special_tokens",
    "limit",
    "bos_token",
    "eos_token",
}


class Prepared(NamedTuple):
    """A request that has been tokenized and checked."""

    request: ManagerRequest
    sampling: SamplingParams
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that are text"""


class Limits(Protocol):
    """What a manager is made for."""

    @property
    def max_seq_len(self) -> int:
        """Prompt and answer together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""


class RequestPreparer:
    """Renders, tokenizes and checks. Thread-safe.

    Args:
        tokenizer: the engine's.
        default_sampling: of requests that bring none.
        default_timeout: seconds, of requests that set none; 0 = none.
        limits: of the manager.
        adapter_id: name of an adapter, or None → the runtime's id. Raises InvalidRequest for an unknown name.
        compile_form: form of the answer → what the manager takes for it. Raises InvalidRequest.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        default_sampling: SamplingParams,
        default_timeout: float,
        limits: Limits,
        adapter_id: Callable[[str | None], int],
        compile_form: Callable[[StructuredOutputs], Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._default_sampling = default_sampling
        self._default_timeout = default_timeout
        self._limits = limits
        self._adapter_id = adapter_id
        self._compile_form = compile_form

    def prepare(self, request: Request) -> Prepared:
        """What the runtime is to be asked. Raises InvalidRequest or ContextTooLong."""
        prompt = self.encode(request)
        max_seq_len = self._limits.max_seq_len
        if request.pooling is not None:
            return self._prepare_pooling(request, _truncated(prompt, request.truncate_prompt_tokens, max_seq_len))
        sampling = request.sampling or self._default_sampling
        wanted = max(1, sampling.min_tokens) if sampling.max_tokens is None else sampling.max_tokens
        prompt = _truncated(prompt, request.truncate_prompt_tokens, max_seq_len - wanted)
        room = max_seq_len - len(prompt)
        if room < wanted:
            limit = "min_tokens" if sampling.max_tokens is None else "max_tokens"
            raise ContextTooLong(
                f"This model's maximum context length is {max_seq_len} tokens. However, the prompt has "
                f"{len(prompt)} and {wanted} output token{'s' * (wanted != 1)} were requested, {len(prompt) + wanted} "
                f"in all. Shorten the prompt or lower {limit}.",
                _prompt_field(request) if room < 1 else limit,
            )
        sampling = sampling.replace(max_tokens=room if sampling.max_tokens is None else sampling.max_tokens)
        form = request.structured_outputs
        chooses = sampling.num_sequences > sampling.n
        native = ManagerRequest(
            prompt,
            sampling,
            n=sampling.num_sequences,
            logprobs=0 if chooses and sampling.logprobs is None else sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            return_logits=request.return_logits,
            **self._service(request),
            bad_words_token_ids=bad_words_token_ids(self._tokenizer, sampling.bad_words),
            constraint=self._compile_form(form) if form is not None else None,
        )
        shown = {self._tokenizer.token_to_id(token) for token in request.shown_special_tokens}
        return Prepared(native, sampling, frozenset(token_id for token_id in shown if token_id is not None))

    def _prepare_pooling(self, request: Request, prompt: tuple[int, ...]) -> Prepared:
        """What is asked of a prompt that nothing follows."""
        if len(prompt) > self._limits.max_seq_len:
            raise ContextTooLong(
                f"This model's maximum context length is {self._limits.max_seq_len} tokens. However, the prompt has "
                f"{len(prompt)}. Shorten the prompt.",
                _prompt_field(request),
            )
        sampling = SamplingParams(max_tokens=1)
        return Prepared(ManagerRequest(prompt, sampling, pooling=request.pooling, **self._service(request)), sampling)

    def _service(self, request: Request) -> dict[str, Any]:
        """Fields of `ManagerRequest` that say how a request is served."""
        return {
            "priority": request.priority,
            "timeout": self._default_timeout if request.timeout is None else request.timeout,
            "cache_salt": request.cache_salt or "",
            "retention_priority": request.retention_priority,
            "adapter": self._adapter_id(request.adapter),
        }

    def encode(self, request: Request) -> tuple[int, ...]:
        """Ids of the prompt. Raises InvalidRequest, or ContextTooLong for one of which that is clear beforehand."""
        limit = self._limits.max_seq_len if request.truncate_prompt_tokens is None else None
        if request.prompt_token_ids is not None:
            return self._checked_ids(request.prompt_token_ids)
        if request.messages is not None:
            reserved = _RESERVED_TEMPLATE_NAMES & request.chat_template_kwargs.keys()
            if reserved:
                raise InvalidRequest(
                    f"chat_template_kwargs may not set {min(reserved)}, which aotllm itself sets",
                    "chat_template_kwargs",
                )
            return tuple(
                self._tokenizer.encode_chat(
                    request.messages,
                    request.add_generation_prompt,
                    request.tools,
                    continue_final_message=request.continue_final_message,
                    chat_template=request.chat_template,
                    limit=limit,
                    **request.chat_template_kwargs,
                )
            )
        assert request.prompt is not None
        prompt = tuple(
            self._tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens, limit=limit)
        )
        if not prompt:
            raise InvalidRequest("the prompt is empty: it has no tokens", "prompt")
        return prompt

    def assembler(self, prepared: Prepared, index: int) -> OutputAssembler:
        """What turns the responses of one sequence into text."""
        from aotllm.tokenization import IncrementalDetokenizer

        request, sampling, shown = prepared
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens, shown=shown
        )
        return OutputAssembler(detokenizer, sampling, index)

    def _checked_ids(self, token_ids: Any) -> tuple[int, ...]:
        vocab_size = self._limits.vocab_size
        for token_id in token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"prompt_token_ids has {token_id!r}; token ids are integers from 0 to {vocab_size - 1}",
                    "prompt_token_ids",
                )
        return tuple(token_ids)


def _truncated(prompt: tuple[int, ...], keep: int | None, room: int) -> tuple[int, ...]:
    """The last tokens of a prompt; `keep` = -1 means those that there is room for."""
    if keep is None:
        return prompt
    return prompt[-keep:] if keep > 0 else prompt[-max(1, room) :]


def _prompt_field(request: Request) -> str:
    if request.messages is not None:
        return "messages"
    return "prompt" if request.prompt is not None else "prompt_token_ids"
