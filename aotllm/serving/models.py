"""`ServedModels`: the loaded engines and their adapters, by the name that clients use."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from aotllm.serving.engine import ServingEngine
from aotllm.serving.errors import ModelNotFound
from aotllm.serving.repository import Repository


class ServedModel(NamedTuple):
    """What a name stands for."""

    name: str
    engine: ServingEngine
    adapter: str | None = None
    """LoRA adapter of the engine, by its name there"""
    parent: str | None = None
    """Name of the model that the adapter is for"""


class ServedModels:
    """The first engine answers requests that name none. The adapters that an engine has loaded at the moment are
    models, too; where names clash, a model comes before an adapter, and the first adapter before others."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._created = int(time.time())

    def get(self, name: str | None) -> ServedModel:
        """What to use. Raises ModelNotFound."""
        served = self._all()
        if name is None and served:
            return next(iter(served.values()))
        if name is None or name not in served:
            raise ModelNotFound(f"The model `{name or ''}` does not exist. Served: {', '.join(served) or 'none'}.")
        return served[name]

    def _all(self) -> dict[str, ServedModel]:
        engines = self._repository.engines()
        served = {name: ServedModel(name, engine) for name, engine in engines.items()}
        for parent, engine in engines.items():
            for adapter in engine.lora_names:
                served.setdefault(adapter, ServedModel(adapter, engine, adapter, parent))
        return served

    def card(self, name: str) -> dict[str, Any]:
        """One entry of `/v1/models`."""
        name, engine, _, parent = self.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "aotllm",
            "root": engine.engine.manifest.model.name or name,
            "parent": parent,
            "max_model_len": engine.max_seq_len,
            "permission": [],
        }

    def cards(self) -> list[dict[str, Any]]:
        """All entries of `/v1/models`."""
        return [self.card(name) for name in self._all()]
