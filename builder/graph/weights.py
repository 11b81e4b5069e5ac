"""Weights as lazy references into a checkpoint: a traced model holds names and shapes, not data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from aotllm.builder.checkpoints.base import Checkpoint
from aotllm.builder.graph.tracer import Tensor, Tracer
from aotllm.errors import CheckpointError


class CheckpointTensor(ir.LazyTensor):
    """A float32 initializer whose data stays in the checkpoint until someone asks for it; nothing is cached.

    Attributes:
        source: canonical name of the tensor in the checkpoint.
        offset: added to every stored value (Gemma's norm weights are stored minus one).
    """

    def __init__(self, checkpoint: Checkpoint, source: str, shape: tuple[int, ...], offset: float = 0.0) -> None:
        self.source = source
        self.offset = offset
        self._checkpoint = checkpoint
        super().__init__(self._load, ir.DataType.FLOAT, ir.Shape(shape), name=source)

    def read(self) -> npt.NDArray[np.float32]:
        """The values, offset included. Raises CheckpointError."""
        stored = self._checkpoint.read(self.source)
        return stored + np.float32(self.offset) if self.offset else stored

    def _load(self) -> ir.TensorProtocol:
        return ir.Tensor(self.read(), name=self.source)


class CheckpointStack(ir.LazyTensor):
    """Matrices of equal shape behind each other, float32 `[count, n, k]`, as lazy as a `CheckpointTensor`.

    Attributes:
        sources: canonical names of the matrices in the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, sources: tuple[str, ...], n: int, k: int) -> None:
        self.sources = sources
        self._checkpoint = checkpoint
        super().__init__(self._load, ir.DataType.FLOAT, ir.Shape((len(sources), n, k)), name=name)

    def _load(self) -> ir.TensorProtocol:
        return ir.Tensor(np.stack([self._checkpoint.read(source) for source in self.sources]), name=self.name)


class Weights:
    """The checkpoint's tensors as initializers of the graph being traced. Only names and shapes are looked at."""

    def __init__(self, tracer: Tracer, checkpoint: Checkpoint) -> None:
        self._tracer = tracer
        self._checkpoint = checkpoint
        self._tensors = checkpoint.tensors()
        self._norm_offset = checkpoint.config.rms_norm_weight_offset

    def matrix(self, name: str, n: int, k: int) -> Tensor:
        """`name` as `[n, k]`. Raises CheckpointError where it is missing or of another shape."""
        return self._initializer(name, (n, k))

    def matrices(self, name: str, sources: Sequence[str], n: int, k: int) -> Tensor:
        """`sources` as one initializer `name` `[count, n, k]`. Raises CheckpointError as `matrix`."""
        for source in sources:
            self._check(source, (n, k))
        return self._tracer.initializer(CheckpointStack(self._checkpoint, name, tuple(sources), n, k))

    def vector(self, name: str, n: int) -> Tensor:
        """`name` as `[n]`. Raises CheckpointError where it is missing or of another shape."""
        return self._initializer(name, (n,))

    def norm(self, name: str, n: int) -> Tensor:
        """An RMSNorm's weight `[n]`, the config's `rms_norm_weight_offset` added. Raises CheckpointError likewise."""
        return self._initializer(name, (n,), self._norm_offset)

    def _initializer(self, name: str, shape: tuple[int, ...], offset: float = 0.0) -> Tensor:
        self._check(name, shape)
        return self._tracer.initializer(CheckpointTensor(self._checkpoint, name, shape, offset))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        info = self._tensors.get(name)
        architecture = self._checkpoint.config.architecture
        if info is None:
            raise CheckpointError(
                f"The checkpoint has no tensor {name!r}, which a {architecture} model needs. "
                "Check that all shards are there and that its config is the one it was saved with."
            )
        if tuple(info.shape) != shape:
            raise CheckpointError(
                f"Tensor {name!r} has shape {list(info.shape)}, but the checkpoint's config asks for {list(shape)} "
                f"in a {architecture} model. Its config and its weights do not belong together."
            )
