"""Model definitions: one file per architecture, composed of the shared pieces of `decoder`."""

from aotllm.builder.models.registry import known_architectures, model_definition, trace

__all__ = ["known_architectures", "model_definition", "trace"]
