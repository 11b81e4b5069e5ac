"""The identity of a model: what it is, not where it lay."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from aotllm.builder.checkpoints.base import Checkpoint


def model_identity(checkpoint: Checkpoint) -> str:
    """SHA-256 over the configuration and the name, type, shape and digest of every tensor, in order of names.

    The same weights in the same storage have the same identity, however they are sharded and whatever their path.
    """
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(checkpoint.config), sort_keys=True).encode())
    for name, info in sorted(checkpoint.tensors().items()):
        digest.update(f"{name} {info.storage} {info.shape} {checkpoint.tensor_digest(name)}\n".encode())
    return digest.hexdigest()
