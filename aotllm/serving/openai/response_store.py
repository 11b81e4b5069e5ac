"""`ResponseStore`: the latest answers of `/v1/responses`, for those that go on from them."""

from __future__ import annotations

from typing import Any, NamedTuple

from aotllm.errors import AotllmError
from aotllm.serving.openai.sse import to_json
from aotllm.serving.shared_table import SharedTable

MAX_BYTES = 256 << 20
"""Of all that is kept, as JSON"""


class ResponseNotFound(AotllmError):
    """No such answer is kept: it was never made here, is deleted, or too old."""

    kind = "response_not_found"
    http_status = 404
    error_type = "NotFoundError"

    def __init__(self, response_id: str, param: str) -> None:
        super().__init__(
            f"Response `{response_id:.80}` is not kept by this server: it was not stored, is deleted, or others have "
            "taken its place. Send the whole conversation as input."
        )
        self.param = param


class Stored(NamedTuple):
    """One answer."""

    response: dict[str, Any]
    """As it was sent"""
    messages: list[dict[str, Any]]
    """The conversation that it ends, itself included; without instructions, which are not carried over"""


class ResponseStore:
    """Bounded in number and in bytes; the oldest go first. Ids are random and long: to know one is to be allowed it.

    Args:
        table: where they are kept, which all front ends see.
        limit: most answers; 0 = keep none.
    """

    def __init__(self, table: SharedTable, limit: int) -> None:
        self._table = table
        self._limit = limit

    async def put(self, stored: Stored) -> None:
        """Keep an answer, unless it alone is too large."""
        size = len(to_json(stored))
        if not self._limit or size > MAX_BYTES:
            return
        entries = self._table.items()
        count, total = len(entries) + 1, size + sum(entry["size"] for entry in entries.values())
        for name, entry in entries.items():
            if count <= self._limit and total <= MAX_BYTES:
                break
            await self._table.remove(name)
            count, total = count - 1, total - entry["size"]
        await self._table.put(stored.response["id"], {**stored._asdict(), "size": size})

    def get(self, response_id: str, param: str) -> Stored:
        """Raises ResponseNotFound, of the field `param`."""
        entry = self._table.items().get(response_id)
        if entry is None:
            raise ResponseNotFound(response_id, param)
        return Stored(entry["response"], entry["messages"])

    async def delete(self, response_id: str) -> None:
        """Raises ResponseNotFound."""
        if await self._table.remove(response_id) is None:
            raise ResponseNotFound(response_id, "response_id")
