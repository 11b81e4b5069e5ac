"""Reading a request of Triton."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aotllm.triton_tensors.models import EITHER
from aotllm.triton_tensors.tensors import BYTES, DataType, InputTensor, text_of


def input_arrays(request: Any) -> dict[str, NDArray[Any]]:
    """Its inputs, by name. They are copies: Triton takes the memory back when `execute` returns."""
    return {tensor.name(): np.array(tensor.as_numpy(), copy=True) for tensor in request.inputs()}


def input_tensors(arrays: Mapping[str, NDArray[Any]]) -> list[InputTensor]:
    """Inputs of the model that holds the engine, whose types Triton has checked."""
    return [
        InputTensor(name, EITHER.inputs[name].datatype.name, array.shape, partial(_elements, name, array))
        for name, array in arrays.items()
    ]


def _elements(name: str, array: NDArray[Any], datatype: DataType) -> list[Any]:
    values: list[Any] = array.reshape(-1).tolist()
    return [text_of(name, value) for value in values] if datatype is BYTES else values


def request_parameters(request: Any) -> dict[str, Any]:
    """Its parameters. Triton hands them over as JSON text."""
    given = request.parameters()
    parameters = json.loads(given) if isinstance(given, str) and given else given
    return dict(parameters or {})


def model_parameters(model_config: str) -> dict[str, str]:
    """The `parameters` of a config.pbtxt, from the JSON that Triton makes of it."""
    parameters: Mapping[str, Mapping[str, str]] = json.loads(model_config).get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items()}
