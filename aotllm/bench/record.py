"""`RequestRecord`: what was seen of one request, and the latencies that follow from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise

from aotllm.errors import AotllmError


class RequestFailed(AotllmError):
    """One request of a benchmark failed, which never ends the run.

    Attributes:
        error_kind: what is counted: `http_503`, `connection`, `timeout`, `stream` (an error event within an answer),
            `incomplete` (the answer broke off), `protocol` (not the answer of such a server).
    """

    def __init__(self, error_kind: str, message: str) -> None:
        super().__init__(message)
        self.error_kind = error_kind


@dataclass
class RequestRecord:
    """One request. All times are seconds of one monotonic clock."""

    wanted_input: int = 0
    """Tokens of text that the prompt was made to have; the server's chat template comes on top"""
    wanted_output: int = 0
    """`max_tokens`"""
    due: float = 0.0
    """When the load shape wanted it sent"""
    sent: float = 0.0
    """When it was sent; a connection that had to be opened counts as part of the request"""
    ended: float | None = None
    """When the answer was complete or had failed"""
    chunk_times: array[float] = field(default_factory=lambda: array("d"))
    """Arrivals of the chunks that carry tokens"""
    chunk_tokens: array[int] = field(default_factory=lambda: array("l"))
    """Tokens of each such chunk where the server counts them within the stream, else empty"""
    finished: float | None = None
    """Arrival of the chunk with the finish reason"""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    """As the server's usage says"""
    texts: list[str] = field(default_factory=list)
    error: RequestFailed | None = None

    # What a client of a server reports -------------------------------------------------------------------------------

    def chunk(self, now: float, text: str, *, visible: bool = False, total_tokens: int | None = None) -> None:
        """A chunk of the answer came.

        Args:
            now: when.
            text: text of the answer in it; may be empty.
            visible: it has content besides text: reasoning, a part of a tool call.
            total_tokens: tokens of the answer up to here, where the server says so in each chunk. A server that says
                it in the last chunk only says nothing about the chunks.
        """
        if text:
            self.texts.append(text)
        counted = len(self.chunk_tokens) == len(self.chunk_times)
        if total_tokens is not None and counted:
            new = total_tokens - (self.output_tokens or 0)
            self.output_tokens = total_tokens
            if new > 0:
                self.chunk_times.append(now)
                self.chunk_tokens.append(new)
            return
        if total_tokens is not None:
            self.output_tokens = total_tokens
        if text or visible:
            del self.chunk_tokens[:]  # counts of some chunks only say nothing about the others
            self.chunk_times.append(now)

    def usage(self, prompt_tokens: int | None, output_tokens: int | None, cached_tokens: int | None) -> None:
        """The server's count of the whole answer."""
        self.prompt_tokens = self.prompt_tokens if prompt_tokens is None else prompt_tokens
        self.output_tokens = self.output_tokens if output_tokens is None else output_tokens
        self.cached_tokens = self.cached_tokens if cached_tokens is None else cached_tokens

    # What follows ----------------------------------------------------------------------------------------------------

    @property
    def ok(self) -> bool:
        """It has ended, and did not fail."""
        return self.ended is not None and self.error is None

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.texts)

    @property
    def num_output_tokens(self) -> int:
        """As the server counts, else one per chunk."""
        return len(self.chunk_times) if self.output_tokens is None else self.output_tokens

    @property
    def first_token(self) -> float | None:
        """Arrival of the first chunk with a token. An answer of an end token only has none with text: its finish
        counts."""
        if self.chunk_times:
            return self.chunk_times[0]
        return self.finished if self.num_output_tokens else None

    @property
    def last_token(self) -> float | None:
        """Arrival of the last token. Tokens beyond those seen are without text, as end tokens are, and come with the
        finish reason."""
        unseen = self.num_output_tokens > (sum(self.chunk_tokens) or len(self.chunk_times))
        if self.finished is not None and unseen:
            return self.finished
        return self.chunk_times[-1] if self.chunk_times else None

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending to the first chunk that carries a token. None without tokens."""
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2el(self) -> float | None:
        """End-to-end latency: from sending to the end of the answer."""
        return None if self.ended is None else self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (last − first) / (tokens − 1). None below two tokens."""
        first, last, tokens = self.first_token, self.last_token, self.num_output_tokens
        if first is None or last is None or tokens < 2:
            return None
        return (last - first) / (tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gap before each chunk but the first. A chunk known to have k tokens counts as k
        gaps of a k-th, so that servers that send several tokens at once compare with others."""
        gaps = [later - earlier for earlier, later in pairwise(self.chunk_times)]
        if not self.chunk_tokens:
            return gaps
        counts = self.chunk_tokens[1:]
        return [gap / count for gap, count in zip(gaps, counts, strict=False) for _ in range(count)]

    def token_arrivals(self) -> list[tuple[float, float]]:
        """(time, tokens) of each chunk; tokens that the server only counts at the end are spread evenly."""
        if self.chunk_tokens:
            return list(zip(self.chunk_times, map(float, self.chunk_tokens), strict=False))
        if not self.chunk_times:
            return [] if self.finished is None else [(self.finished, float(self.num_output_tokens))]
        each = max(1.0, self.num_output_tokens / len(self.chunk_times))
        return [(time, each) for time in self.chunk_times]
