"""Which architectures there are, and how a checkpoint of one becomes a graph."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from aotllm.builder.checkpoints.base import Checkpoint
from aotllm.builder.graph.tracer import TOKENS, Tensor, Tracer
from aotllm.builder.graph.weights import Weights
from aotllm.builder.models.decoder import Decoder
from aotllm.builder.models.gemma2 import gemma2
from aotllm.builder.models.gemma3 import gemma3
from aotllm.builder.models.llama import llama
from aotllm.builder.models.mixtral import mixtral
from aotllm.builder.models.qwen2 import qwen2
from aotllm.builder.models.qwen3 import qwen3
from aotllm.builder.models.qwen3_moe import qwen3_moe
from aotllm.errors import UnsupportedModel

ModelDefinition = Callable[[Decoder], Tensor]
"""Traces a whole model: from the decoder's inputs to logits `[tokens, vocab_size]`."""

_DEFINITIONS: dict[str, ModelDefinition] = {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "llama": llama,
    "mistral": llama,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def known_architectures() -> list[str]:
    """Names that `model_definition` takes, sorted."""
    return sorted(_DEFINITIONS)


def model_definition(architecture: str) -> ModelDefinition:
    """The function that traces models of `architecture`. Raises UnsupportedModel for an unknown one."""
    definition = _DEFINITIONS.get(architecture)
    if definition is None:
        raise UnsupportedModel(
            f"Architecture {architecture!r} is not implemented; known ones: {', '.join(known_architectures())}"
        )
    return definition


def trace(checkpoint: Checkpoint, max_seq_len: int) -> ir.Model:
    """The checkpoint's model as a graph of standard ONNX operators over lazy weights; no weight is read.

    Inputs `input_ids` and `positions`, int64 `[tokens]`: one sequence without a past, positions ascending. Output
    `logits`, float32 `[tokens, vocab_size]`.

    Args:
        checkpoint: names, shapes and config are looked at now, its data when someone reads the graph's initializers.
        max_seq_len: longest sequence of the engine, in tokens; some RoPE variants depend on it.

    Raises:
        UnsupportedModel: unknown architecture, RoPE variant or activation.
        CheckpointError: a tensor is missing or has another shape than the config asks for.
    """
    config = checkpoint.config
    definition = model_definition(config.architecture)
    tracer = Tracer(config.name or config.architecture)
    token_ids = tracer.input("input_ids", (TOKENS,), ir.DataType.INT64)
    positions = tracer.input("positions", (TOKENS,), ir.DataType.INT64)
    decoder = Decoder.create(config, Weights(tracer, checkpoint), token_ids, positions, max_seq_len)
    logits = definition(decoder)
    return tracer.finish({"logits": logits}, {"architecture": config.architecture, "max_seq_len": str(max_seq_len)})
