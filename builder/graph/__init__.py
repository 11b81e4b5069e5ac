"""The graph: an ONNX model held in `onnx_ir`, traced from plain Python functions.

`tracer` records, `ops` is the functional op set that model definitions are written in, `weights` are lazy references
into a checkpoint, `structure` saves a graph without them.
"""

from aotllm.builder.graph.structure import save_structure
from aotllm.builder.graph.tracer import Tensor, Tracer
from aotllm.builder.graph.weights import CheckpointStack, CheckpointTensor, Weights

__all__ = ["CheckpointStack", "CheckpointTensor", "Tensor", "Tracer", "Weights", "save_structure"]
