"""What front ends and the engine process say to each other: MessagePack, each message behind its length.

Requests carry ids that the front end chooses; the engine process keeps those of different front ends apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import msgspec

from aotllm.manager import ManagerRequest, Response
from aotllm.sampling_params import SamplingParams
from aotllm.structured_outputs import Grammar

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 30

_UINT64 = 2**64 - 1


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# --- from a front end ------------------------------------------------------------------------------------------------


class Submit(_Message):
    """A request; answered by Accepted or Refused."""

    id: int
    model: str
    request: dict[str, Any]
    """`ManagerRequest` without its constraint"""
    grammar: tuple[str, str, str] | None
    """`Grammar` that the answer keeps to"""


class Cancel(_Message):
    """See `Manager.cancel`."""

    id: int
    sequence_index: int


class Query(_Message):
    """A call of one of the engine process's methods; answered by Answer."""

    id: int
    method: str
    args: list[Any]


class Seen(_Message):
    """This front end serves what the `State` or `TableChange` number `version` says."""

    version: int


class Gathered(_Message):
    """What this front end says to `Gather` number `id`."""

    id: int
    value: Any


# --- from the engine process -----------------------------------------------------------------------------------------


class Accepted(_Message):
    """The request is queued."""

    id: int


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An `AotllmError`."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float | None = None


class Refused(_Message):
    """The request is not queued."""

    id: int
    failure: Failure


class Answer(_Message):
    """What a query returned."""

    id: int
    value: Any = None
    failure: Failure | None = None


class ModelState(msgspec.Struct, frozen=True):
    """One engine."""

    name: str
    path: str
    state: str
    """As of `RepositoryEntry`"""
    reason: str = ""
    alive: bool = True
    generation: int = 0
    """Times that it was loaded"""
    max_seq_len: int = 0
    vocab_size: int = 0
    adapters: dict[str, int] = {}
    """Name → id of the runtime"""


class State(_Message):
    """Everything that front ends have to know of the engines; sent when it changes."""

    version: int
    models: list[ModelState]
    timeout: float
    """Of requests that set none, in seconds"""


class TableChange(_Message):
    """An entry of a shared table has come, or has gone."""

    version: int
    table: str
    name: str
    present: bool
    value: Any = None


class Gather(_Message):
    """Somebody asks all front ends for a topic; answered by Gathered."""

    id: int
    topic: str


class TokenScores(msgspec.Struct, array_like=True, frozen=True):
    """`_runtime.TokenLogprobs`."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Times(msgspec.Struct, array_like=True, frozen=True):
    """`_runtime.SequenceTimings`."""

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float


class Tokens(_Message):
    """A `Response` in the middle of a sequence, with nothing but tokens: most of them."""

    request_id: int
    sequence_index: int
    num_cached_tokens: int
    token_ids: list[int]

    logprobs: ClassVar[list[Any]] = []
    logits: ClassVar[list[Any]] = []
    prompt_logprobs: ClassVar[list[Any]] = []
    finish_reason: ClassVar[str | None] = None
    stop_token_id: ClassVar[int | None] = None
    error_kind: ClassVar[str | None] = None
    error_message: ClassVar[str | None] = None
    num_prompt_tokens: ClassVar[int] = 0
    num_preemptions: ClassVar[int] = 0
    num_draft_tokens: ClassVar[int] = 0
    num_accepted_tokens: ClassVar[int] = 0
    timings: ClassVar[Times | None] = None
    embedding: ClassVar[Any] = None


class FullResponse(_Message):
    """Any other `Response`."""

    request_id: int
    sequence_index: int
    token_ids: list[int]
    logprobs: list[TokenScores]
    logit_rows: list[bytes]
    """float32 each"""
    prompt_logprobs: list[TokenScores]
    finish_reason: str | None
    stop_token_id: int | None
    error_kind: str | None
    error_message: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int
    timings: Times | None
    embedding_row: bytes | None
    """float32"""

    @property
    def logits(self) -> list[Any]:
        """float32 `[vocab_size]` per token."""
        return [_floats(row) for row in self.logit_rows]

    @property
    def embedding(self) -> Any:
        """float32 `[hidden_size]`, or None."""
        return None if self.embedding_row is None else _floats(self.embedding_row)


class Responses(_Message):
    """What a step gave to the requests of this front end, in order."""

    responses: list[Tokens | FullResponse]


ToEngine = Submit | Cancel | Query | Seen | Gathered
ToFrontEnd = Accepted | Refused | Answer | State | TableChange | Gather | Responses

to_engine = msgspec.msgpack.Decoder(ToEngine)
to_front_end = msgspec.msgpack.Decoder(ToFrontEnd)
_encoder = msgspec.msgpack.Encoder()


def frame(message: _Message) -> bytes:
    """A message behind its length."""
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def wire_request(request: ManagerRequest) -> dict[str, Any]:
    """A request without its constraint, of plain types."""
    fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(request) if f.name != "constraint"}
    sampling = {f.name: getattr(request.sampling, f.name) for f in dataclasses.fields(request.sampling)}
    if sampling["seed"] is not None:
        sampling["seed"] &= _UINT64
    return {**fields, "sampling": sampling}


def manager_request(wire: dict[str, Any], constraint: Any) -> ManagerRequest:
    """The inverse of `wire_request`. Raises InvalidRequest where a value is out of range."""
    return ManagerRequest(**{**wire, "sampling": SamplingParams(**wire["sampling"])}, constraint=constraint)


def wire_grammar(grammar: Grammar | None) -> tuple[str, str, str] | None:
    """A grammar of plain types."""
    return None if grammar is None else (grammar.kind, grammar.text, grammar.param)


def wire_response(request_id: int, response: Response) -> Tokens | FullResponse:
    """A runtime's response under the front end's id."""
    if response.finish_reason is None and not (
        response.error_kind or response.logprobs or response.logits or response.prompt_logprobs
    ):
        return Tokens(request_id, response.sequence_index, response.num_cached_tokens, list(response.token_ids))
    times = response.timings
    return FullResponse(
        request_id,
        response.sequence_index,
        list(response.token_ids),
        _scores(response.logprobs),
        [row.tobytes() for row in response.logits],
        _scores(response.prompt_logprobs),
        response.finish_reason,
        response.stop_token_id,
        response.error_kind,
        response.error_message,
        response.num_prompt_tokens,
        response.num_cached_tokens,
        response.num_preemptions,
        response.num_draft_tokens,
        response.num_accepted_tokens,
        None if times is None else Times(times.queue_seconds, times.first_token_seconds, times.total_seconds),
        None if response.embedding is None else response.embedding.tobytes(),
    )


def _floats(row: bytes) -> Any:
    import numpy as np  # here: processes that never see a row need none of it

    return np.frombuffer(row, np.float32)


def _scores(native: list[Any]) -> list[TokenScores]:
    return [TokenScores(entry.token_id, entry.logprob, list(entry.top)) for entry in native]
