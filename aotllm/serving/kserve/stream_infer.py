"""`stream_infer`: the RPC ModelStreamInfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from google.protobuf.message import DecodeError

from aotllm.errors import AotllmError
from aotllm.serving.kserve.errors import fault, sentence
from aotllm.serving.kserve.grpc_codec import (
    EMPTY_FINAL,
    StepEncoder,
    error_in_stream,
    in_stream,
    request_of,
    response_of,
)
from aotllm.serving.kserve.inference import Inference
from aotllm.serving.kserve.protocol.messages import ModelInferRequest
from aotllm.serving.kserve.rpcs import OpenConnection

_MOST_UNANSWERED = 1024
"""Requests of one stream that are worked on; before there are fewer no more are read"""


class _ClientLeft(Exception):
    """A response could not be sent."""


async def stream_infer(inference: Inference, messages: AsyncIterator[bytes], rpc: Any) -> None:
    """Answer requests as they come, side by side, until the client has sent its last one and all are answered.

    A request that fails is told in a response of its own; the others go on. When the client cancels the RPC, or its
    deadline is over, gRPC cancels this coroutine, and with it all of its requests.
    """
    stream = _Stream(inference, rpc)
    running: set[asyncio.Task[None]] = set()
    try:
        async for data in messages:
            task = asyncio.create_task(stream.answer(data))
            running.add(task)
            task.add_done_callback(running.discard)
            while len(running) >= _MOST_UNANSWERED:
                await asyncio.wait(set(running), return_when=asyncio.FIRST_COMPLETED)
        while running:
            await asyncio.wait(set(running))
    finally:
        for task in running:
            task.cancel()


class _Stream:
    def __init__(self, inference: Inference, rpc: Any) -> None:
        self._inference = inference
        self._rpc = rpc
        self._metadata = dict(rpc.invocation_metadata() or ())
        self._turn = asyncio.Lock()  # gRPC takes one message at a time

    async def answer(self, data: bytes) -> None:
        """Answer one request. Raises nothing but CancelledError."""
        request_id = ""
        try:
            message = ModelInferRequest.FromString(data)
            request_id = message.id
            await self._run(message)
        except _ClientLeft:
            pass
        except DecodeError as error:
            await self._fail(f"the message is no ModelInferRequest: {error}", request_id)
        except AotllmError as error:
            await self._fail(sentence(error), request_id)
        except Exception as error:
            await self._fail(fault(error, "ModelStreamInfer").message, request_id)

    async def _run(self, message: Any) -> None:
        inference = self._inference
        call = inference.call("ModelStreamInfer", self._metadata)
        request = request_of(message, inference.shared_memory)
        generation = inference.generation(request, call)
        if not generation.stream:
            tensors = await inference.whole(generation, call, OpenConnection())
            response = response_of(request, tensors, inference.shared_memory, final=True)
            await self._write(in_stream(response.SerializeToString()))
            return
        ends_empty = request.parameters.get(EMPTY_FINAL) is True
        stream = await inference.start(generation, call)
        encoder = StepEncoder(request, stream.answers.step, stream.plain, not ends_empty, inference.shared_memory)
        async with aclosing(stream.steps()) as steps:
            async for step in steps:
                await self._write(encoder.encode(step))
        if ends_empty:
            await self._write(encoder.end())

    async def _fail(self, message: str, request_id: str) -> None:
        with suppress(_ClientLeft):
            await self._write(error_in_stream(message, request_id))

    async def _write(self, response: bytes) -> None:
        async with self._turn:
            try:
                await self._rpc.write(response)
            except Exception as error:  # of several kinds, and sooner than `rpc.done()` knows
                raise _ClientLeft from error
