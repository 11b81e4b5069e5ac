"""`Inference`: runs requests, whichever protocol they came in."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from aotllm.errors import TimedOut
from aotllm.request import RequestOutput
from aotllm.request_handle import RequestHandle
from aotllm.serving.call import Call
from aotllm.serving.context import ServingContext
from aotllm.serving.generation import Connection, beam_results, merged, results, shutting_down, submit_all
from aotllm.serving.kserve.infer_request import InferRequest
from aotllm.serving.kserve.models import KserveModel, KserveModels
from aotllm.serving.kserve.shared_memory import SystemSharedMemory
from aotllm.serving.kserve.statistics import STATISTICS_TOPIC, CountingTelemetry, Statistics
from aotllm.triton_tensors.answers import Answers, Step
from aotllm.triton_tensors.generation import Generation, Target, generation_of
from aotllm.triton_tensors.output_fields import PERF_METRICS
from aotllm.triton_tensors.tensors import Tensor

_PLAIN = frozenset(("text_output", "batch_index", "sequence_index"))


@dataclass
class ModelGeneration(Generation):
    """What one of the models here is to do."""

    model: KserveModel


class Inference:
    """One per front end, of `Inference.of`: routes and RPCs share it, so that they count together."""

    @classmethod
    def of(cls, context: ServingContext) -> Inference:
        """That of a front end."""
        # Not setdefault: making a second one would offer its empty statistics in place of the first one's.
        inference: Inference | None = context.shared.get(cls)
        if inference is None:
            inference = context.shared[cls] = cls(context)
        return inference

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self.models = KserveModels(context.models, context.repository)
        self.statistics = Statistics()
        context.peers.offer(STATISTICS_TOPIC, self.statistics.snapshot)
        self.shared_memory = SystemSharedMemory(context.shared_memory)

    def call(self, endpoint: str, headers: Any) -> Call:
        """The call behind headers or metadata, whose requests are counted."""
        return Call.from_headers(endpoint, headers, CountingTelemetry(self.context.telemetry, self.statistics))

    def generation(self, request: InferRequest, call: Call, stream: bool = False) -> ModelGeneration:
        """What is to be done. Raises AotllmError for what can be refused beforehand."""
        model = self.models.get(request.model, request.version)
        call.model = model.name
        engine, options = model.served.engine, self.context.options
        target = Target(
            model.tensors,
            engine.tokenizer,
            engine.engine.manifest.eos_token_ids,
            options.exclude_input_in_output,
            options.max_prompts,
            model.served.adapter,
        )
        listed = frozenset(output.name for output in request.outputs)
        generation = generation_of(request.inputs, request.parameters, target, listed, stream=stream)
        return ModelGeneration(**vars(generation), model=model)

    async def whole(self, generation: ModelGeneration, call: Call, client: Connection) -> list[Tensor]:
        """All answers at once. Raises AotllmError; TimedOut where the time was over before."""
        answers = await self._answers(generation)
        engine, requests = generation.model.served.engine, generation.requests
        if generation.beams is not None:
            done = await beam_results(engine, requests, generation.beams, client, call)
        else:
            done = await results(await submit_all(engine, requests, call), client)
        if any(output.finish_reason == "timeout" for result in done for output in result.outputs):
            raise _timed_out()
        start = time.monotonic_ns()
        tensors = answers.whole(done)
        self.statistics.record(generation.model.name, {"compute_output": time.monotonic_ns() - start})
        return tensors

    async def start(self, generation: ModelGeneration, call: Call) -> Stream:
        """Submit a request that streams. Raises AotllmError."""
        answers = await self._answers(generation)
        handles = await submit_all(generation.model.served.engine, generation.requests, call)
        return Stream(generation, answers, handles)

    async def _answers(self, generation: ModelGeneration) -> Answers:
        if generation.outputs.isdisjoint(PERF_METRICS):
            return Answers(generation)
        memory = await generation.model.served.engine.memory_async()
        return Answers(generation, memory.tokens_per_block)


class Stream:
    """A request that streams, on its way."""

    def __init__(self, generation: Generation, answers: Answers, handles: Sequence[RequestHandle]) -> None:
        self.generation = generation
        self.answers = answers
        self.plain = generation.outputs <= _PLAIN and "text_output" in generation.outputs
        """There is only text, and whose it is"""
        self._handles = handles

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Each step with something to tell. The requests are cancelled when the consumer leaves.

        Raises:
            TimedOut: after what there was in time.
            AotllmError: the request failed.
        """
        left = len(self._handles) * self.generation.n
        timed_out = False
        try:
            async for prompt, output in _outputs(self._handles):
                if output.finish_reason is not None:
                    left -= 1
                    timed_out = timed_out or output.finish_reason == "timeout"
                elif self.plain and not output.text:
                    continue
                handle = self._handles[prompt]
                result: RequestOutput | None = None
                if output.finish_reason is not None and handle.done:
                    result = handle.result()
                yield Step(prompt, output, len(handle.prompt_token_ids), result, left == 0 and not timed_out)
        finally:
            self.close()
        if timed_out:
            raise _timed_out()

    def close(self) -> None:
        """Cancel what has not ended."""
        for handle in self._handles:
            handle.cancel()


async def _outputs(handles: Sequence[RequestHandle]) -> AsyncIterator[tuple[int, Any]]:
    """Outputs of all handles, as of `merged`, which costs a task per handle."""
    if len(handles) > 1:
        async for prompt, output in merged(handles):
            yield prompt, output
        return
    async for output in handles[0]:
        if output.finish_reason == "cancelled":
            raise shutting_down()
        yield 0, output


def _timed_out() -> TimedOut:
    return TimedOut("the request's timeout was over before its answer was complete; allow more time or fewer tokens")
