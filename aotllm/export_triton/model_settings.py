"""`ModelSettings`: what a model of the repository is told by the parameters of its config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotllm.parameters import ParameterSpec, check_parameters, documented, parameter, parameters

ENGINE_FOLDER = "engine"
"""Of an engine that is in the repository: inside the folder of the version"""


@documented
@dataclass(frozen=True)
class ModelSettings:
    """Besides these the model that holds the engine takes the fields of `ExecutorConfig`."""

    engine: str = parameter(
        ENGINE_FOLDER, ParameterSpec("Folder of the engine; a relative one is inside the model's version.", str)
    )
    verify: bool = parameter(True, ParameterSpec("Check the engine's digests when the model is loaded.", bool))
    exclude_input_in_output: bool = parameter(
        False, ParameterSpec("Leave the prompt out of answers that are not streamed, unless the request says.", bool)
    )
    cancellation_check_period_ms: int = parameter(
        100,
        ParameterSpec("Milliseconds between two looks whether clients have gone.", int, low=1, high=60_000),
    )
    target_model: str = parameter("engine", ParameterSpec("Of an alias: the model that holds the engine.", str))
    max_requests: int = parameter(
        1024,
        ParameterSpec("Of an alias: most requests in flight; more of them wait.", int, low=1, high=100_000),
    )

    def __post_init__(self) -> None:
        check_parameters(self)

    @classmethod
    def from_parameters(cls, given: Mapping[str, str]) -> ModelSettings:
        """From texts; raises InvalidRequest for one that is out of range. Names that are others' are let pass."""
        fields: dict[str, Any] = {}
        for name, _, spec in parameters(cls):
            if name in given:
                fields[name] = _parsed(given[name], spec.kind)
        return cls(**fields)

    def engine_folder(self, version_folder: Path) -> Path:
        """Where the engine is."""
        return version_folder / self.engine


def _parsed(text: str, kind: type) -> Any:
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text  # which the schema refuses, with what is allowed
