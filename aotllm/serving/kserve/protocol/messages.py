"""The message classes of `open_inference.proto`.

Their descriptors live in a pool of their own: Triton's client registers messages of the same names in the default one,
and both have to work in one process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from aotllm.serving.kserve.protocol.descriptor import FILE_DESCRIPTOR

_pool = DescriptorPool()
_pool.AddSerializedFile(FILE_DESCRIPTOR)

SERVICE: Any = _pool.FindServiceByName("inference.GRPCInferenceService")
"""Descriptor of the service"""


def message_class(name: str) -> Any:
    """Class of a message by its name in the package: `ModelInferRequest`. Raises KeyError."""
    return GetMessageClass(_pool.FindMessageTypeByName(f"inference.{name}"))


ModelInferRequest: Any = message_class("ModelInferRequest")
ModelInferResponse: Any = message_class("ModelInferResponse")
ModelStreamInferResponse: Any = message_class("ModelStreamInferResponse")
