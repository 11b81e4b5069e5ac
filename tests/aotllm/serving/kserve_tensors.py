"""Inputs for Triton's clients, gRPC and HTTP alike."""

from __future__ import annotations

from typing import Any

import numpy as np

DTYPES: dict[str, Any] = {
    "BYTES": np.object_,
    "INT32": np.int32,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "UINT64": np.uint64,
}
TYPES = {
    "text_input": "BYTES",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "guided_decoding_guide": "BYTES",
    "guided_decoding_guide_type": "BYTES",
    "temperature": "FP32",
    "top_p": "FP32",
    "seed": "UINT64",
    **dict.fromkeys(("stream", "streaming", "exclude_input_in_output"), "BOOL"),
    **dict.fromkeys(("return_log_probs", "return_generation_logits", "return_perf_metrics"), "BOOL"),
    **dict.fromkeys(("return_num_input_tokens", "return_num_output_tokens"), "BOOL"),
}
"""Of other names: INT32"""


def tensors(library: Any, **values: Any) -> list[Any]:
    """`InferInput`s of `tritonclient.grpc` or `.http`; a plain value stands for a tensor [1, 1] of it."""
    inputs = []
    for name, value in values.items():
        datatype = TYPES.get(name, "INT32")
        array = np.array(value if isinstance(value, list) else [[value]], DTYPES[datatype])
        tensor = library.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def prompt(library: Any, text: str | list[Any] = "hi", max_tokens: int = 100, **values: Any) -> list[Any]:
    """What a text model has to be given, and more."""
    return tensors(library, text_input=text, max_tokens=max_tokens, **values)
