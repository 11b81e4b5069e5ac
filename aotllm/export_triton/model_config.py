"""`config.pbtxt`: what Triton is to know of a model, as text of its protobuf message `ModelConfig`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from aotllm.triton_tensors.input_fields import InputField
from aotllm.triton_tensors.models import TensorModel
from aotllm.triton_tensors.output_fields import OutputField


def model_config(
    name: str, model: TensorModel, *, max_batch_size: int, decoupled: bool, parameters: Mapping[str, str]
) -> str:
    """The text for a model of the Python backend.

    Args:
        name: of the model, and of its folder.
        model: its tensors.
        max_batch_size: most rows of a request, at least 1: shapes begin with the batch dimension.
        decoupled: a request may have several responses, and has to be sent by a streaming call.
        parameters: for the model itself.
    """
    blocks = [
        f"name: {_quoted(name)}",
        'backend: "python"',
        f"max_batch_size: {max_batch_size}",
        f"model_transaction_policy {{\n  decoupled: {str(decoupled).lower()}\n}}",
        # One process, whatever number of devices there is: the executor knows which of them it uses.
        "instance_group [\n  {\n    count: 1\n    kind: KIND_CPU\n  }\n]",
        _tensors("input", model.inputs.values()),
        _tensors("output", model.outputs.values()),
        *(_parameter(key, value) for key, value in parameters.items()),
    ]
    return "\n".join(blocks) + "\n"


def _tensors(name: str, fields: Iterable[InputField | OutputField]) -> str:
    return f"{name} [\n" + ",\n".join(map(_tensor, fields)) + "\n]"


def _tensor(field: InputField | OutputField) -> str:
    lines = [
        f"    name: {_quoted(field.name)}",
        f"    data_type: {field.datatype.config_name}",
        f"    dims: [ {', '.join(map(str, field.dims))} ]",
    ]
    if isinstance(field, InputField) and not field.required:
        lines.append("    optional: true")
    return "\n".join(["  {", *lines, "  }"])


def _parameter(key: str, value: str) -> str:
    return f"parameters {{\n  key: {_quoted(key)}\n  value {{\n    string_value: {_quoted(value)}\n  }}\n}}"


def _quoted(text: str) -> str:
    # The escapes of JSON are those of protobuf's text format, but for \u, which is not needed outside of ASCII.
    return json.dumps(text, ensure_ascii=False)
