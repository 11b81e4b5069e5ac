"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from aotllm.embedding import EmbeddingOutput, normalized
from aotllm.errors import InvalidRequest
from aotllm.request import Pooling, Request
from aotllm.serving.context import ServingContext
from aotllm.serving.engine import ServingEngine
from aotllm.serving.generation import results, submit_all
from aotllm.serving.openai.usage import usage

_PROMPT_FIELDS = ("prompt", "prompt_token_ids")
"""Of `Request`, which `input` becomes"""

_REQUEST_FIELDS = ("priority", "timeout", "cache_salt", "retention_priority")
"""Of `Request`, by the same names; their ranges are checked there"""


class EmbeddingRequest(BaseModel):
    """Body of `/v1/embeddings`. Fields after `user` are ours or vLLM's."""

    model_config = ConfigDict(extra="allow")

    input: str | list[int] | list[str] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of little-endian float32.")
    dimensions: int | None = Field(None, ge=1, description="Leave this many leading numbers, and normalize again.")
    user: str | None = Field(None, description="Without effect.")

    pooling: Pooling = Field("mean", description="Whose hidden state: the mean of all tokens, or the last one's.")
    normalize: bool = Field(True, description="Divide by the Euclidean length.")
    add_special_tokens: bool = Field(True, description="Begin a text with the tokenizer's BOS token, if any.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Leave this many tokens of each input; -1 = as many as the context holds."
    )
    truncation_side: Literal["left", "right"] = Field("right", description="Where tokens are cut off.")
    priority: int | None = Field(None, description="A higher one is admitted first and preempted last.")
    timeout: float | None = Field(None, description="Seconds after which there is an error instead.")
    cache_salt: str | None = Field(None, description="Share cached prefixes with requests of an equal salt only.")
    retention_priority: int | None = Field(None, description="Cached prefixes of a higher one are evicted later.")

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    def inputs(self, most: int) -> list[str | list[int]]:
        """The inputs, one or many, each a text or token ids. Raises InvalidRequest for none or more than `most`."""
        inputs: list[Any] = [self.input]
        if isinstance(self.input, list) and (not self.input or not isinstance(self.input[0], int)):
            inputs = self.input
        if not 1 <= len(inputs) <= most or any(len(each) == 0 for each in inputs):
            raise InvalidRequest(
                f"input must hold 1 to {most} texts or lists of token ids, none of them empty; got {len(inputs)}",
                "input",
            )
        return inputs

    def check_dimensions(self, hidden_size: int) -> None:
        """Raises InvalidRequest for more dimensions than the model has."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidRequest(
                f"dimensions must be between 1 and {hidden_size}, the model's own, got {self.dimensions}", "dimensions"
            )

    def most_tokens(self, max_seq_len: int) -> int | None:
        """Where to cut the inputs; None = nowhere. Raises InvalidRequest for a length out of range."""
        wanted = self.truncate_prompt_tokens
        if wanted is None:
            return None
        if wanted == -1:
            return max_seq_len
        if not 1 <= wanted <= max_seq_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be between 1 and {max_seq_len}, or -1 for that, got {wanted}",
                "truncate_prompt_tokens",
            )
        return wanted


async def embeddings(context: ServingContext, body: EmbeddingRequest, client: HttpRequest) -> Response:
    """A vector for each input. Raises AotllmError; nothing is computed then for the other inputs either."""
    served = context.models.get(body.model)
    call = context.http_call(client)
    call.model = served.name
    requests = await _requests(served.engine, served.adapter, body, context.options.max_prompts)
    try:
        handles = await submit_all(served.engine, requests, call)
    except InvalidRequest as error:
        if error.param in _PROMPT_FIELDS:
            error.param = "input"  # the client's name of it
        raise
    outputs = [EmbeddingOutput.from_result(r, normalize=False) for r in await results(handles, client)]
    body.check_dimensions(len(outputs[0].embedding))
    return JSONResponse(_answer(served.name, body, outputs))


async def _requests(
    engine: ServingEngine, adapter: str | None, body: EmbeddingRequest, max_inputs: int
) -> list[Request]:
    most = body.most_tokens(engine.max_seq_len)
    inputs = body.inputs(max_inputs)
    if most is not None:
        inputs = await asyncio.to_thread(_cut, engine, body, inputs, most)
    options = {name: value for name in _REQUEST_FIELDS if (value := getattr(body, name)) is not None}
    return [
        Request(
            prompt=each if isinstance(each, str) else None,
            prompt_token_ids=None if isinstance(each, str) else each,
            add_special_tokens=body.add_special_tokens,
            adapter=adapter,
            pooling=body.pooling,
            **options,
        )
        for each in inputs
    ]


def _cut(
    engine: ServingEngine, body: EmbeddingRequest, inputs: Sequence[str | list[int]], most: int
) -> list[str | list[int]]:
    cut: list[str | list[int]] = []
    for each in inputs:
        ids = engine.tokenizer.encode(each, body.add_special_tokens, param="input") if isinstance(each, str) else each
        cut.append(list(ids[:most] if body.truncation_side == "right" else ids[-most:]))
    return cut


def _answer(model: str, body: EmbeddingRequest, outputs: Sequence[EmbeddingOutput]) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(output.embedding, body)}
        for index, output in enumerate(outputs)
    ]
    counts = usage(
        sum(output.num_prompt_tokens for output in outputs), 0, sum(output.num_cached_tokens for output in outputs)
    )
    return {
        "id": f"embd-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": counts,
    }


def _encoded(embedding: Any, body: EmbeddingRequest) -> str | list[float]:
    vector = embedding[: body.dimensions]
    if body.normalize:
        vector = normalized(vector)
    if body.encoding_format == "base64":
        import numpy as np  # here: a server that is asked for no embeddings needs none of it

        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
