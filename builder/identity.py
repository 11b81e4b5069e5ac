"""The identity of a model: what it is, not where it lay."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

from aotllm.builder.checkpoints.base import Checkpoint


def model_identity(checkpoint: Checkpoint) -> str:
    """SHA-256 over the configuration and the name, type, shape and digest of every tensor, in order of names.

    The same weights in the same storage have the same identity, however they are sharded and whatever their path.
    """
    tensors = sorted(checkpoint.tensors().items())
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(checkpoint.config), sort_keys=True).encode())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        digests = pool.map(checkpoint.tensor_digest, [name for name, _ in tensors])
        for (name, info), tensor_digest in zip(tensors, digests, strict=True):
            digest.update(f"{name} {info.storage} {info.shape} {tensor_digest}\n".encode())
    return digest.hexdigest()
