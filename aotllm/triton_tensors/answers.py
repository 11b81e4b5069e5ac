"""`Answers`: the tensors of finished requests, and of the steps of those that stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from aotllm.request import RequestOutput, SequenceOutput, TokenOutput
from aotllm.triton_tensors.generation import Generation
from aotllm.triton_tensors.output_fields import PERF_METRICS
from aotllm.triton_tensors.tensors import Tensor


class Step(NamedTuple):
    """What one step added to one answer."""

    prompt: int
    """Index in the batch"""
    output: TokenOutput
    num_input_tokens: int
    result: RequestOutput | None
    """Of the prompt, with its last step"""
    final: bool
    """The last one of the whole request"""


class Answers:
    """Of one request of a client. Shapes begin with [batch, n], but for `text_output`, which is flat, prompt by prompt.

    Args:
        generation: what was asked for.
        tokens_per_block: of the engine's KV cache, for the counters of blocks; 0 = unknown, and not asked for.
    """

    def __init__(self, generation: Generation, tokens_per_block: int = 0) -> None:
        self._generation = generation
        self._tokens_per_block = tokens_per_block
        fields = generation.target.tensors.outputs
        self._fields = [field for name, field in fields.items() if name in generation.outputs]
        self._submitted_ns = time.monotonic_ns()
        self._cumulative: dict[tuple[int, int], float] = {}

    def whole(self, results: Sequence[RequestOutput], first_prompt: int = 0) -> list[Tensor]:
        """Finished answers: to all prompts, equally many each, or to some of them from `first_prompt` on."""
        batch, n = len(results), len(results[0].outputs)
        prompts = range(first_prompt, first_prompt + batch)
        every = [output for result in results for output in result.outputs]
        ids = [self._ids(result, output) for result in results for output in result.outputs]
        columns: dict[str, tuple[tuple[int, ...], Any]] = {
            "text_output": (
                (len(every),),
                [self._text(i, o) for i, r in zip(prompts, results, strict=True) for o in r.outputs],
            ),
            "output_ids": _padded(batch, n, ids, self._generation.pad_id),
            "sequence_length": ((batch, n), [len(one) for one in ids]),
            "batch_index": ((batch, 1), list(prompts)),
            "sequence_index": ((batch, n), [output.index for output in every]),
            "num_input_tokens": ((batch, 1), [result.num_prompt_tokens for result in results]),
            "num_output_tokens": ((batch, n), [len(output.token_ids) for output in every]),
            "cum_log_probs": ((batch, n), [output.cumulative_logprob or 0.0 for output in every]),
            "output_log_probs": _padded(batch, n, [[p.logprob for p in output.logprobs] for output in every], 0.0),
        }
        if "generation_logits" in self._generation.outputs:
            columns["generation_logits"] = _logits(batch, n, [output.logits for output in every])
        if not self._generation.outputs.isdisjoint(PERF_METRICS):
            metrics = [self._metrics(result) for result in results]
            columns |= {name: ((batch, 1), [one[name] for one in metrics]) for name in PERF_METRICS}
        return [Tensor(field.name, field.datatype, *columns[field.name]) for field in self._fields]

    def step(self, step: Step) -> list[Tensor]:
        """What a step has: new text or tokens; the metrics come with the last one."""
        output = step.output
        key = step.prompt, output.index
        if output.logprobs:
            self._cumulative[key] = self._cumulative.get(key, 0.0) + sum(p.logprob for p in output.logprobs)
        count = len(output.token_ids)
        columns: dict[str, tuple[tuple[int, ...], Any]] = {
            "text_output": ((1,), [output.text]),
            "output_ids": ((1, 1, count), list(output.token_ids)),
            "sequence_length": ((1, 1), [count]),
            "batch_index": ((1, 1), [step.prompt]),
            "sequence_index": ((1, 1), [output.index]),
            "num_input_tokens": ((1, 1), [step.num_input_tokens]),
            "num_output_tokens": ((1, 1), [count]),
            "cum_log_probs": ((1, 1), [self._cumulative.get(key, 0.0)]),
            "output_log_probs": ((1, 1, len(output.logprobs)), [p.logprob for p in output.logprobs]),
        }
        if "generation_logits" in self._generation.outputs:
            columns["generation_logits"] = _logits(1, 1, [output.logits])
        if step.result is not None and not self._generation.outputs.isdisjoint(PERF_METRICS):
            columns |= {name: ((1, 1), [value]) for name, value in self._metrics(step.result).items()}
        return [Tensor(f.name, f.datatype, *columns[f.name]) for f in self._fields if f.name in columns]

    def _text(self, prompt: int, output: SequenceOutput) -> str:
        if self._generation.exclude_input:
            return output.text
        return f"{self._generation.requests[prompt].prompt or ''}{output.text}"

    def _ids(self, result: RequestOutput, output: SequenceOutput) -> list[int]:
        prompt = () if self._generation.exclude_input else result.prompt_token_ids
        return [*prompt, *output.token_ids]

    def _metrics(self, result: RequestOutput) -> dict[str, int | float]:
        """Times are nanoseconds of the monotonic clock; blocks are those of the first group of layers."""
        timings, start = result.timings, self._submitted_ns
        total = result.num_prompt_tokens + result.num_generated_tokens
        blocks = -(-total // self._tokens_per_block) if self._tokens_per_block else 0
        reused = result.num_cached_tokens // self._tokens_per_block if self._tokens_per_block else 0
        first = timings.first_token_seconds if timings.first_token_seconds is not None else timings.total_seconds
        scheduled = timings.queue_seconds if timings.queue_seconds is not None else first
        return {
            "kv_cache_alloc_new_blocks": blocks - reused,
            "kv_cache_reused_blocks": reused,
            "kv_cache_alloc_total_blocks": blocks,
            "arrival_time_ns": start,
            "first_scheduled_time_ns": start + round(scheduled * 1e9),
            "first_token_time_ns": start + round(first * 1e9),
            "last_token_time_ns": start + round(timings.total_seconds * 1e9),
            "acceptance_rate": result.draft_acceptance or 0.0,
            "total_accepted_draft_tokens": sum(output.num_accepted_tokens for output in result.outputs),
            "total_draft_tokens": sum(output.num_draft_tokens for output in result.outputs),
        }


def _padded(batch: int, n: int, rows: Sequence[list[Any]], fill: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Shape [batch, n, length of the longest row] and its elements."""
    width = max(map(len, rows), default=0)
    return (batch, n, width), [value for row in rows for value in [*row, *[fill] * (width - len(row))]]


def _logits(batch: int, n: int, rows: Sequence[Sequence[Any]]) -> tuple[tuple[int, ...], Any]:
    """float32 [batch, n, tokens, vocab_size]; zeros fill up shorter answers."""
    import numpy as np

    length = max(map(len, rows), default=0)
    vocab_size = next((len(row[0]) for row in rows if len(row)), 0)
    values = np.zeros((len(rows), length, vocab_size), np.float32)
    for target, row in zip(values, rows, strict=True):
        for position, logits in enumerate(row):
            target[position] = logits
    return (batch, n, length, vocab_size), values
