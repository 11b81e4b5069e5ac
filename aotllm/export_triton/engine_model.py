"""`EngineModel`: the model of the repository that holds the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import triton_python_backend_utils as triton

from aotllm.errors import AotllmError, Cancelled, InvalidRequest, Overloaded
from aotllm.executor import Executor
from aotllm.executor_config import ExecutorConfig
from aotllm.export_triton.inputs import input_arrays, input_tensors, model_parameters, request_parameters
from aotllm.export_triton.job import CancellationWatch, Job, begin_jobs
from aotllm.export_triton.model_metrics import ModelMetrics, Outcome
from aotllm.export_triton.model_settings import ModelSettings
from aotllm.parameters import parameters
from aotllm.request import Request, RequestOutput
from aotllm.request_handle import RequestHandle
from aotllm.triton_tensors.answers import Answers, Step
from aotllm.triton_tensors.generation import Generation, Target, generation_of
from aotllm.triton_tensors.models import EITHER
from aotllm.triton_tensors.tensors import Tensor

_MOST_PROMPTS = 2**31 - 1  # Triton itself holds requests to max_batch_size


class EngineModel:
    """What Triton's Python backend calls. One executor answers all requests, on one event loop: `execute` hands them
    over and returns, so that any number of them is in flight, batched by the runtime.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine. Raises AotllmError, which Triton shows as the reason why the model is not ready."""
        given = model_parameters(args["model_config"])
        settings = ModelSettings.from_parameters(given)
        folder = Path(args["model_repository"], args["model_version"])
        self._executor = Executor(settings.engine_folder(folder), executor_config(given), verify=settings.verify)
        self._target = Target(
            EITHER,
            self._executor.tokenizer,
            self._executor.engine.manifest.eos_token_ids,
            settings.exclude_input_in_output,
            _MOST_PROMPTS,
        )
        self._decoupled = triton.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self._tokens_per_block = self._executor.memory().tokens_per_block
        self._metrics = ModelMetrics(args["model_name"])
        self._by_request_id: dict[str, set[_Work]] = defaultdict(set)
        self._works: set[_Work] = set()
        self._watch = CancellationWatch(settings.cancellation_check_period_ms / 1000)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aotllm-requests", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Begin to answer."""
        begin_jobs(requests, self._begin)

    def finalize(self) -> None:
        """End; what is in flight ends as cancelled."""
        self._watch.stop()
        self._executor.shutdown()
        asyncio.run_coroutine_threadsafe(self._finished(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, job: Job, request: Any) -> None:
        arrays = input_arrays(request)
        stop = arrays.pop("stop", None)
        if stop is not None and stop.any():
            self._loop.call_soon_threadsafe(self._stop, job)
            return
        given = request_parameters(request) | {"timeout": request.timeout()}
        generation = generation_of(input_tensors(arrays), given, self._target, job.wanted, listing_asks=False)
        if not self._decoupled and generation.stream:
            raise InvalidRequest(
                "this model answers in one piece; leave stream out, or export it without --no-decoupled", "stream"
            )
        work = _Work(job, generation, self._executor, self._decoupled, self._tokens_per_block)
        job.on_gone = partial(self._loop.call_soon_threadsafe, work.cancel)
        self._loop.call_soon_threadsafe(self._start, work)
        self._watch.add(job)

    # On the loop -----------------------------------------------------------------------------------------------------

    def _start(self, work: _Work) -> None:
        self._works.add(work)
        self._metrics.begin()
        request_id = work.job.request_id
        if request_id:
            self._by_request_id[request_id].add(work)
        work.task = self._loop.create_task(work.run())
        work.task.add_done_callback(lambda _: self._forget(work))

    def _forget(self, work: _Work) -> None:
        self._works.discard(work)
        self._metrics.end(work.outcome, work.num_tokens)
        works = self._by_request_id.get(work.job.request_id)
        if works is not None:
            works.discard(work)
            if not works:
                del self._by_request_id[work.job.request_id]

    def _stop(self, job: Job) -> None:
        """What came with `stop` ends the requests of the same id, which keep what they have, and has no answer."""
        for work in self._by_request_id.get(job.request_id, ()):
            work.cancel()
        job.send([], final=True)

    async def _finished(self) -> None:
        await asyncio.gather(*(work.task for work in self._works if work.task is not None), return_exceptions=True)


class _Work:
    """The answering of one job, on the loop."""

    def __init__(
        self, job: Job, generation: Generation, executor: Executor, decoupled: bool, tokens_per_block: int
    ) -> None:
        self.job = job
        self.task: asyncio.Task[None] | None = None
        self.outcome: Outcome = "success"
        self.num_tokens = 0
        """Generated up to now"""
        self._generation = generation
        self._answers = Answers(generation, tokens_per_block)
        self._executor = executor
        self._decoupled = decoupled
        self._running: list[RequestHandle | asyncio.Future[Any]] = []
        self._cancelled = False
        self._left = len(generation.requests) * (1 if generation.beams else generation.n)
        """Sequences, or beam searches, that have not ended"""

    def cancel(self) -> None:
        """Nobody wants more."""
        self._cancelled = True
        for running in self._running:
            running.cancel()

    async def run(self) -> None:
        """Answer, and end the job whatever happens."""
        try:
            # The first failure ends all.
            requests = self._generation.requests
            results = await asyncio.gather(*(self._answer(prompt, request) for prompt, request in enumerate(requests)))
            if not self._decoupled:
                self._send(self._answers.whole([result for result in results if result is not None]), final=True)
            self.job.close()
        except AotllmError as error:
            self.outcome = "cancelled" if isinstance(error, Cancelled) else "error"
            self.job.fail(self._reason(error))
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            self.job.fail(Cancelled("the request was cancelled"))
        except Exception as error:
            self.outcome = "error"
            triton.Logger.log_error(f"request {self.job.request_id}: {error!r}")
            self.job.fail(error)
        finally:
            self.cancel()

    async def _answer(self, prompt: int, request: Request) -> RequestOutput | None:
        """Answers a prompt, or returns its result where all prompts are answered together."""
        if self._cancelled:
            raise Cancelled("the request was cancelled")
        beams = self._generation.beams
        if beams is not None:
            search = asyncio.ensure_future(self._executor.beam_search_async(request, beams))
            self._running.append(search)
            result = await search
        else:
            handle = await self._executor.submit_async(request)
            self._running.append(handle)
            if self._cancelled:
                handle.cancel()
            if self._generation.stream:
                await self._stream(prompt, handle)
                return None
            result = await handle
        self.num_tokens += result.num_generated_tokens
        self._check([output.finish_reason for output in result.outputs])
        if not self._decoupled:
            return result
        parts = [result] if beams else [dataclasses.replace(result, outputs=(output,)) for output in result.outputs]
        for part in parts:
            self._left -= 1
            self._send(self._answers.whole([part], prompt), final=self._left == 0)
        return None

    async def _stream(self, prompt: int, handle: RequestHandle) -> None:
        async for output in handle:
            ends = output.finish_reason is not None
            self.num_tokens += len(output.token_ids)
            self._check([output.finish_reason])
            self._left -= ends
            result = await handle if ends and handle.done else None
            step = Step(prompt, output, len(handle.prompt_token_ids), result, self._left == 0)
            self._send(self._answers.step(step), step.final)

    def _send(self, tensors: Sequence[Tensor], final: bool) -> None:
        self.job.send([triton.Tensor(tensor.name, tensor.to_numpy()) for tensor in tensors], final)

    def _check(self, finish_reasons: Sequence[str | None]) -> None:
        """A sequence that was cancelled is an error, unless it was by `stop`."""
        if "cancelled" not in finish_reasons:
            return
        self.outcome = "cancelled"
        if self.job.gone or not self._cancelled:
            raise Cancelled("the request was cancelled")

    def _reason(self, error: AotllmError) -> AotllmError:
        if isinstance(error, Cancelled) and not self._cancelled:
            return Overloaded("the model is being unloaded; try again later")
        return error


def executor_config(given: Mapping[str, str]) -> ExecutorConfig:
    """From those parameters of a model that are fields of `ExecutorConfig`. Raises InvalidRequest."""
    fields: dict[str, Any] = {}
    for name, _, spec in parameters(ExecutorConfig):
        if name not in given:
            continue
        text = given[name]
        try:
            fields[name] = {"true": True, "false": False}[text] if spec.kind is bool else spec.kind(text)
        except (KeyError, ValueError):
            raise InvalidRequest(f"{name} must be {spec.allowed}, got {text!r:.40}; see config.pbtxt", name) from None
    return ExecutorConfig(**fields)
