"""`ServedModels`: the executors of a server, by the name that clients use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aotllm.executor import Executor
from aotllm.serving.errors import ModelNotFound


class ServedModels:
    """Name → executor, at least one; the first one answers requests that name none."""

    def __init__(self, executors: Mapping[str, Executor]) -> None:
        if not executors:
            raise ValueError("a server needs at least one executor")
        self._executors = dict(executors)
        self._created = int(time.time())

    def get(self, name: str | None) -> tuple[str, Executor]:
        """The name and executor to use. Raises ModelNotFound."""
        if name is None:
            return next(iter(self._executors.items()))
        if name not in self._executors:
            raise ModelNotFound(f"The model `{name}` does not exist. Served: {', '.join(self._executors)}.")
        return name, self._executors[name]

    @property
    def alive(self) -> bool:
        """All executors take requests."""
        return all(executor.alive for executor in self._executors.values())

    def card(self, name: str) -> dict[str, Any]:
        """One entry of `/v1/models`."""
        name, executor = self.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "aotllm",
            "root": executor.engine.manifest.model.name or name,
            "parent": None,
            "max_model_len": executor.max_seq_len,
            "permission": [],
        }

    def cards(self) -> list[dict[str, Any]]:
        """All entries of `/v1/models`."""
        return [self.card(name) for name in self._executors]
