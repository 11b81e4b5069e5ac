"""What the server and its models are, in JSON's terms, from which the messages of gRPC are made, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aotllm
from aotllm.serving.kserve.models import VERSION, KserveModel
from aotllm.triton_tensors.input_fields import InputField

SERVER_NAME = "aotllm"
PLATFORM = "aotllm"
EXTENSIONS = (
    "model_repository",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "generate",
)


def server_metadata() -> dict[str, Any]:
    """Of `ServerMetadata`."""
    return {"name": SERVER_NAME, "version": aotllm.__version__, "extensions": list(EXTENSIONS)}


def model_metadata(model: KserveModel) -> dict[str, Any]:
    """Of `ModelMetadata`. Shapes have the batch dimension."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_tensor(f.name, f.datatype.name, f.dims) for f in _inputs(model)],
        "outputs": [_tensor(f.name, f.datatype.name, f.dims) for f in model.tensors.outputs.values()],
    }


def model_config(model: KserveModel, max_batch_size: int) -> dict[str, Any]:
    """Of `ModelConfig`. Dims are those without the batch dimension."""
    engine = model.served.engine
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": "aotllm",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": max_batch_size,
        "input": [
            {"name": f.name, "data_type": f.datatype.config_name, "dims": list(f.dims), "optional": not f.required}
            for f in _inputs(model)
        ],
        "output": [
            {"name": f.name, "data_type": f.datatype.config_name, "dims": list(f.dims)}
            for f in model.tensors.outputs.values()
        ],
        "instance_group": [{"name": f"{model.name}_0", "kind": "KIND_CPU", "count": 1}],
        "model_transaction_policy": {"decoupled": True},
        "parameters": {
            "max_seq_len": {"string_value": str(engine.max_seq_len)},
            "base_model": {"string_value": str(engine.engine.manifest.model.name or model.name)},
        },
    }


def _inputs(model: KserveModel) -> list[InputField]:
    return [field for field in model.tensors.inputs.values() if field.supported]


def _tensor(name: str, datatype: str, dims: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [-1, *dims]}
