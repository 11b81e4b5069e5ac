"""`ServedModels`: the executors of a server and their adapters, by the name that clients use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from aotllm.executor import Executor
from aotllm.serving.errors import ModelNotFound


class ServedModel(NamedTuple):
    """What a name stands for."""

    name: str
    executor: Executor
    adapter: str | None = None
    """LoRA adapter of the executor, by its name there"""
    parent: str | None = None
    """Name of the model that the adapter is for"""


class ServedModels:
    """Name → executor, at least one; the first one answers requests that name none. The adapters that an executor has
    loaded at the moment are models, too; where names clash, a model comes before an adapter, and the first adapter
    before others."""

    def __init__(self, executors: Mapping[str, Executor]) -> None:
        if not executors:
            raise ValueError("a server needs at least one executor")
        self._executors = dict(executors)
        self._created = int(time.time())

    def get(self, name: str | None) -> ServedModel:
        """What to use. Raises ModelNotFound."""
        served = self._all()
        if name is None:
            return next(iter(served.values()))
        if name not in served:
            raise ModelNotFound(f"The model `{name}` does not exist. Served: {', '.join(served)}.")
        return served[name]

    def _all(self) -> dict[str, ServedModel]:
        served = {name: ServedModel(name, executor) for name, executor in self._executors.items()}
        for parent, executor in self._executors.items():
            for adapter in executor.lora_names:
                served.setdefault(adapter, ServedModel(adapter, executor, adapter, parent))
        return served

    @property
    def alive(self) -> bool:
        """All executors take requests."""
        return all(executor.alive for executor in self._executors.values())

    def card(self, name: str) -> dict[str, Any]:
        """One entry of `/v1/models`."""
        name, executor, _, parent = self.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "aotllm",
            "root": executor.engine.manifest.model.name or name,
            "parent": parent,
            "max_model_len": executor.max_seq_len,
            "permission": [],
        }

    def cards(self) -> list[dict[str, Any]]:
        """All entries of `/v1/models`."""
        return [self.card(name) for name in self._all()]
