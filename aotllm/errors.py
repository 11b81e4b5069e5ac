"""The one error hierarchy of aotllm.

Every failure that a caller can meet is one of these classes. Each carries a message that says what was wrong, what
was got, what is allowed and what to do, and maps to one process exit code and one HTTP status; the maps live here and
nowhere else. The C++ runtime raises the same classes across its binding, by `kind`.
"""

from __future__ import annotations


class AotllmError(Exception):
    """Base of all errors that aotllm raises on purpose.

    Attributes:
        kind: stable name, shared with the C++ runtime (`aotllm::ErrorKind`).
        exit_code: exit code of the command line for this kind.
        http_status: HTTP status of the OpenAI-compatible server for this kind.
        error_type: value of `error.type` in HTTP bodies.
    """

    kind = "internal"
    exit_code = 1
    http_status = 500
    error_type = "InternalServerError"

    @property
    def message(self) -> str:
        """The sentence for people, without the class name."""
        return str(self.args[0]) if self.args else self.kind


class InvalidRequest(AotllmError):
    """A request parameter is out of range or contradicts another one. `param` names it, or is None."""

    kind = "invalid_request"
    exit_code = 2
    http_status = 400
    error_type = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """Prompt plus requested tokens can never fit the engine's context length or its KV memory."""

    kind = "context_too_long"


class Overloaded(AotllmError):
    """The bounded queue is full. `retry_after` is a hint in seconds."""

    kind = "overloaded"
    exit_code = 5
    http_status = 503
    error_type = "ServiceUnavailableError"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TimedOut(AotllmError):
    """The time of a request was over before its answer was. Raised by the command line, and for embeddings: elsewhere
    what there is of the answer is kept, with the finish reason "timeout"."""

    kind = "timed_out"
    exit_code = 5
    http_status = 504
    error_type = "TimeoutError"


class CheckpointError(AotllmError):
    """A checkpoint file is missing, truncated, malformed or contradicts itself. The message names file and reason."""

    kind = "checkpoint"
    exit_code = 3
    http_status = 400
    error_type = "BadRequestError"


class UnsupportedModel(AotllmError):
    """The checkpoint is well-formed, but its architecture or a feature of it is not implemented."""

    kind = "unsupported_model"
    exit_code = 3
    http_status = 400
    error_type = "BadRequestError"


class EngineError(AotllmError):
    """An engine bundle is missing, damaged or malformed. The message names file and reason."""

    kind = "engine"
    exit_code = 3


class EngineIncompatible(AotllmError):
    """A sound engine that this machine or this version cannot run: what it needs, what is here, how to rebuild."""

    kind = "engine_incompatible"
    exit_code = 4


class Cancelled(AotllmError):
    """The request was cancelled by its owner or by shutdown."""

    kind = "cancelled"
    http_status = 499
    error_type = "Cancelled"


class Unavailable(AotllmError):
    """What would run the request has gone, and is not coming back by itself."""

    kind = "unavailable"
    http_status = 503
    error_type = "ServiceUnavailableError"


class Internal(AotllmError):
    """A fault of aotllm itself; please report it."""

    kind = "internal"


ERROR_KINDS: dict[str, type[AotllmError]] = {
    cls.kind: cls
    for cls in (
        InvalidRequest,
        ContextTooLong,
        Overloaded,
        TimedOut,
        CheckpointError,
        UnsupportedModel,
        EngineError,
        EngineIncompatible,
        Cancelled,
        Unavailable,
        Internal,
    )
}
