"""Perplexity of an engine of target cpu on a text, and what quantization costs of it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from aotllm.engines import Engine, open_engine
from aotllm.errors import InvalidRequest

if TYPE_CHECKING:
    from aotllm import _runtime
    from aotllm.builder.options import BuildOptions

CHUNK_TOKENS: Final = 512
MAX_CHUNKS: Final = 64
MIN_TOKENS: Final = 32
_ROWS: Final = 64
"""Logits asked for at a time: those of a large vocabulary take a megabyte each"""


@dataclass(frozen=True)
class Perplexity:
    """Of the second halves of chunks of a text, the first halves being their context."""

    perplexity: float
    """exp of the mean negative log-likelihood"""
    scored_tokens: int
    chunk_tokens: int


@dataclass(frozen=True)
class QuantizationCost:
    """An engine beside one of the same checkpoint that was built without `--quantize`."""

    quantized: Perplexity
    unquantized: Perplexity

    @property
    def change(self) -> float:
        """Relative: 0.01 = the perplexity is 1 % higher."""
        return self.quantized.perplexity / self.unquantized.perplexity - 1


def measure_perplexity(engine: Engine, text: str, num_threads: int = 0) -> Perplexity:
    """Perplexity of `text`, by the engine's own kernels.

    The text is cut to chunks of 512 tokens (of the longest sequence, where that is shorter), of which the first 64
    count; the beginning-of-text token, where the model has one, replaces the first of each.

    Args:
        engine: of target cpu.
        text: at least 32 tokens; a text of less than a chunk is a shorter chunk.
        num_threads: 0 = as many as an executor takes.

    Raises:
        InvalidRequest: the text is too short, or the engine is for another target.
    """
    from aotllm import _runtime

    if engine.manifest.target.name != "cpu":
        raise InvalidRequest(
            f"report_perplexity: the engine is for target {engine.manifest.target.name!r}; only engines of target cpu "
            "are measured, leave --report-perplexity out",
            "report_perplexity",
        )
    chunks = _chunks(engine, text)
    num_blocks = -(-len(chunks[0]) // engine.manifest.limits.tokens_per_block)
    runner = _runtime.CpuRunner(str(engine.rank_file()), num_blocks, num_threads)
    losses = [loss for chunk in chunks for loss in _losses(runner, chunk)]
    return Perplexity(math.exp(math.fsum(losses) / len(losses)), len(losses), len(chunks[0]))


def quantization_cost(model: str | Path, engine_path: Path, options: BuildOptions, text: str) -> QuantizationCost:
    """Measures an engine, and one that is built for that, beside it, from the same checkpoint without quantization.

    Args:
        model: the checkpoint of `engine_path`.
        engine_path: an engine of target cpu that was built with `options`.
        options: with `quantize`.
        text: see `measure_perplexity`.

    Raises:
        as `build` and `measure_perplexity`.
    """
    from aotllm.builder.build import build

    quantized = measure_perplexity(open_engine(engine_path, verify=False), text)
    plain = replace(
        options, quantize=None, quantize_group=None, quantize_symmetric=False, quantize_lm_head=False, force=False
    )
    with tempfile.TemporaryDirectory(prefix=f".{engine_path.name}.", dir=engine_path.resolve().parent) as folder:
        build(model, Path(folder) / "unquantized", plain)
        unquantized = measure_perplexity(open_engine(Path(folder) / "unquantized", verify=False), text)
    return QuantizationCost(quantized, unquantized)


def _chunks(engine: Engine, text: str) -> list[list[int]]:
    """Equally long ones."""
    tokenizer = engine.tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < MIN_TOKENS:
        raise InvalidRequest(
            f"report_perplexity: the text has {len(ids)} tokens, expected at least {MIN_TOKENS}", "report_perplexity"
        )
    size = min(CHUNK_TOKENS, len(ids), engine.manifest.limits.max_seq_len)
    chunks = [list(ids[first : first + size]) for first in range(0, len(ids) - size + 1, size)][:MAX_CHUNKS]
    bare, special = (tokenizer.encode("a", add_special_tokens=with_special) for with_special in (False, True))
    if len(special) > len(bare) and special[0] != bare[0]:
        chunks = [[special[0], *chunk[1:]] for chunk in chunks]
    return chunks


def _losses(runner: _runtime.CpuRunner, chunk: Sequence[int]) -> Iterator[float]:
    """Negative log-likelihoods of the tokens of a chunk's second half."""
    first = len(chunk) // 2 - 1  # the position that says what the second half begins with
    table = list(range(-(-len(chunk) // runner.tokens_per_block)))
    step = min(_ROWS, runner.max_num_tokens)
    for begin in range(0, first, runner.max_num_tokens):
        runner.step([chunk[begin : min(begin + runner.max_num_tokens, first)]], [begin], [table], ["none"])
    for begin in range(first, len(chunk) - 1, step):
        tokens = list(chunk[begin : min(begin + step, len(chunk) - 1)])
        logits = runner.step([tokens], [begin], [table], ["all"]).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        following = chunk[begin + 1 : begin + 1 + len(tokens)]
        yield from np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(tokens)), following]
