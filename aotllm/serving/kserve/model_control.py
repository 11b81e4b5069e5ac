"""`ModelControl`: the repository of models, as clients see and change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.serving.kserve.inference import Inference
from aotllm.serving.kserve.models import VERSION
from aotllm.serving.kserve.statistics import STATISTICS_TOPIC, Statistics


class ModelControl:
    """In JSON's terms, from which the messages of gRPC are made, too."""

    def __init__(self, inference: Inference) -> None:
        self._models = inference.models
        self._peers = inference.context.peers
        self._repository = inference.context.repository

    def index(self, repository_name: str = "", ready: bool = False) -> list[dict[str, Any]]:
        """All models, or those that are ready. Raises InvalidRequest for the name of a repository: there is one."""
        _check_repository(repository_name)
        return [
            {"name": entry.name, "version": VERSION, "state": entry.state, "reason": entry.reason}
            for entry in self._models.index()
            if entry.state == "READY" or not ready
        ]

    async def load(self, name: str, repository_name: str, parameters: Any) -> None:
        """Load an engine, or load it again.

        Raises:
            InvalidRequest: another configuration or other files are given, which engines do not take.
            ModelNotFound: the server was not started with it.
            AotllmError: it cannot be loaded.
        """
        _check_repository(repository_name)
        if parameters and not isinstance(parameters, Mapping):
            raise InvalidRequest(f"parameters must be an object, got {parameters!r:.60}", "parameters")
        if parameters:
            raise InvalidRequest(
                f"loading takes no {', '.join(sorted(parameters))[:200]}: an engine is loaded as it was built",
                "parameters",
            )
        await self._repository.load(self._models.engine_of(name))

    async def unload(self, name: str, repository_name: str) -> None:
        """Unload an engine when its requests have finished. Raises ModelNotFound."""
        _check_repository(repository_name)
        await self._repository.unload(self._models.engine_of(name))

    async def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Of one model or all that are loaded, over all front ends. Raises ModelNotFound, ModelNotReady."""
        names = [self._models.get(name, version).name] if name else [entry["name"] for entry in self.index(ready=True)]
        total = Statistics()
        for snapshot in await self._peers.gather(STATISTICS_TOPIC):
            total.add(snapshot)
        return {"model_stats": [total.of(one, VERSION) for one in names]}


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequest(f"there is no repository {name!r:.80}: leave repository_name out", "repository_name")
