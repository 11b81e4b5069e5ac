"""`TensorModel`: what a model takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from aotllm.triton_tensors.input_fields import ID_INPUTS, TEXT_INPUTS, InputField
from aotllm.triton_tensors.output_fields import ID_OUTPUTS, TEXT_OUTPUTS, OutputField


@dataclass(frozen=True)
class TensorModel:
    """Its fields, by name and in order."""

    inputs: Mapping[str, InputField]
    outputs: Mapping[str, OutputField]

    @cached_property
    def by_option(self) -> Mapping[str, InputField]:
        """Inputs by the option that they set, for which there may be several."""
        return {field.sets: field for field in reversed(list(self.inputs.values())) if field.supported}


TEXT = TensorModel(TEXT_INPUTS, TEXT_OUTPUTS)
IDS = TensorModel(ID_INPUTS, ID_OUTPUTS)
EITHER = TensorModel(
    {name: field._replace(required=False) for name, field in {**TEXT_INPUTS, **ID_INPUTS}.items()},
    {**TEXT_OUTPUTS, **ID_OUTPUTS},
)
"""Takes text or token ids under the names of both, and gives both"""

CLASSIC_MODELS: Mapping[str, TensorModel] = {"ensemble": TEXT, "tensorrt_llm_bls": TEXT, "tensorrt_llm": IDS}
"""The models that clients of TensorRT-LLM know, by name"""
