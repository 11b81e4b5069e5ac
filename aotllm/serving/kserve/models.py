"""`KserveModels`: the names under which engines are served here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from aotllm.serving.errors import ModelNotFound
from aotllm.serving.kserve.errors import ModelNotReady
from aotllm.serving.models import ServedModel, ServedModels
from aotllm.serving.repository import ModelState, Repository
from aotllm.triton_tensors.models import CLASSIC_MODELS, TEXT, TensorModel

VERSION = "1"
"""Every model has this one"""

_ID_NAME = "tensorrt_llm"


class KserveModel(NamedTuple):
    """What a name stands for."""

    name: str
    served: ServedModel
    tensors: TensorModel
    """What it takes and gives: token ids or text"""


class IndexEntry(NamedTuple):
    """One line of the repository index."""

    name: str
    state: ModelState
    reason: str


class KserveModels:
    """An engine (or LoRA adapter) NAME takes text as `NAME`, and token ids as `NAME/tensorrt_llm`.

    The engine that comes first on the command line, loaded or not, is also `ensemble`, `tensorrt_llm_bls` (text) and
    `tensorrt_llm` (ids), the names that clients of the classic TensorRT-LLM models use; an engine of such a name comes
    before.
    """

    def __init__(self, models: ServedModels, repository: Repository) -> None:
        self._models = models
        self._repository = repository

    def get(self, name: str, version: str = "") -> KserveModel:
        """What to use.

        Raises:
            ModelNotFound: no such name or version.
            ModelNotReady: it is not loaded now.
        """
        target, tensors = self._target(name)
        if version not in ("", VERSION, "-1"):
            raise ModelNotFound(
                f"The model `{name:.80}` has no version {version!r:.40}; it has version {VERSION} only."
            )
        try:
            return KserveModel(name, self._models.get(target), tensors)
        except ModelNotFound:
            for entry in self._repository.entries():
                if entry.name == target:
                    raise ModelNotReady(
                        f"The model `{name:.80}` is {entry.state}{f' ({entry.reason:.200})' if entry.reason else ''}; "
                        "load it first."
                    ) from None
            raise

    def engine_of(self, name: str) -> str:
        """The repository's name for the engine behind a model, for loading and unloading."""
        return self._target(name)[0]

    def index(self) -> Iterator[IndexEntry]:
        """All models: engines, the classic names of the first one, and adapters."""
        entries = self._repository.entries()
        for entry in entries:
            yield IndexEntry(entry.name, entry.state, entry.reason)
        known = {entry.name for entry in entries}
        if entries:
            for alias in CLASSIC_MODELS:
                if alias not in known:
                    yield IndexEntry(alias, entries[0].state, entries[0].reason)
        if len(entries) > 1:
            for entry in entries:
                yield IndexEntry(f"{entry.name}/{_ID_NAME}", entry.state, entry.reason)
        for engine in self._repository.engines().values():
            for adapter in engine.lora_names:
                if adapter not in known:
                    known.add(adapter)
                    yield IndexEntry(adapter, "READY", "")

    def _target(self, name: str) -> tuple[str, TensorModel]:
        """Name of the engine or adapter, and what it is asked for with."""
        entries = [entry.name for entry in self._repository.entries()]
        if name in entries:
            return name, TEXT
        if entries and name in CLASSIC_MODELS:
            return entries[0], CLASSIC_MODELS[name]
        engine, _, suffix = name.rpartition("/")
        if engine and suffix in CLASSIC_MODELS:
            return engine, CLASSIC_MODELS[suffix]
        return name, TEXT
