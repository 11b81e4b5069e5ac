#!/usr/bin/env python3
"""Llama-3.1-8B's shape on one GPU against vLLM's figures: build, load, and a table of requests × input/output tokens.

    python scripts/bench_gpu.py [--quick] [--dtype bf16|fp8|both] [--work DIR] [--json FILE]
    python scripts/bench_gpu.py --tp 2                # ranks, a GPU each
    python scripts/bench_gpu.py --engine DIR          # one that is there already
    python scripts/bench_gpu.py --target cpu --layers 2 --hidden 256 --intermediate 512 --heads 4 --kv-heads 2 \\
        --head-dim 64 --vocab 512 --rows 1x16/8 4x32/8      # the script itself, without a GPU

Weights and prompts are random; requests go to the runtime's manager as token ids, all at once, greedy, to the full
length, without prefix cache and detokenization. Each figure is the better of two runs after a short one, which is how
vLLM was measured. Takes about 35 GB in --work while it runs, and removes them unless --keep.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from aotllm import SamplingParams
from aotllm.builder.build import build
from aotllm.builder.options import BuildOptions
from aotllm.engines import Engine, open_engine
from aotllm.errors import AotllmError
from aotllm.executor_config import ExecutorConfig
from aotllm.manager import ManagerRequest, RuntimeManager
from aotllm.tuning import tune
from random_llama import LlamaShape, write_random_llama

RUNS = 2
SECONDS_ALLOWED = 480.0
"""No further row is begun after these"""
POLL_SECONDS = 60.0
"""Without any news, the runtime hangs"""


@dataclass(frozen=True)
class Row:
    """`requests` of `input_len` prompt tokens and `output_len` new ones each, all at once."""

    requests: int
    input_len: int
    output_len: int

    @classmethod
    def parse(cls, text: str) -> Row:
        """From `64x1024/256`."""
        try:
            requests, lengths = text.replace("×", "x").split("x")
            row = cls(int(requests), *map(int, lengths.split("/")))
        except (ValueError, TypeError):
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected REQUESTSxINPUT/OUTPUT, e.g. 64x1024/256"
            ) from None
        if min(asdict(row).values()) < 1:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers from 1 on")
        return row

    def __str__(self) -> str:
        return f"{self.requests}×{self.input_len}/{self.output_len}"

    @property
    def length(self) -> int:
        return self.input_len + self.output_len


ROWS = [
    Row(1, 128, 256),
    Row(8, 128, 256),
    Row(32, 128, 256),
    Row(64, 128, 256),
    Row(256, 128, 256),
    Row(64, 1024, 256),
    Row(256, 1024, 256),
    Row(1, 2048, 1),
    Row(1, 8000, 1),
    Row(16, 4096, 1),
]
QUICK_ROWS = [ROWS[0], ROWS[3], ROWS[4], ROWS[7]]

# Seconds of vLLM 0.22.0 (torch 2.11, FlashAttention-3, CUDA graphs) on an H200, driver 580.159, same shape and
# requests; docs/benchmarks.md, "Llama-3.1-8B on an H200", has the conditions.
VLLM_SECONDS = {
    "bf16": (1.262, 1.319, 1.496, 1.754, 3.803, 3.521, 10.902, 0.0456, 0.2069, 1.600),
    "fp8": (0.905, 0.935, 1.220, 1.286, 2.793, 2.549, 7.841, 0.0296, 0.1368, 1.032),
}
VLLM = {dtype: dict(zip(ROWS, seconds, strict=True)) for dtype, seconds in VLLM_SECONDS.items()}


@dataclass
class Result:
    """One row's figures."""

    row: Row
    seconds: float
    """From the first submit to the last token, of the better run"""
    first_token_seconds: float
    """Median over the requests of that run"""
    steps: int
    """Of a run"""
    preemptions: int
    """Of all runs together"""
    vllm_seconds: float | None
    """On one GPU; None for other rows and layouts"""

    @property
    def ms_per_step(self) -> float:
        """The batch's prefill included."""
        return 1e3 * self.seconds / self.row.output_len

    @property
    def tokens_per_second(self) -> float:
        """Output tokens, or prompt tokens where only one token is asked for."""
        per_request = self.row.output_len if self.row.output_len > 1 else self.row.input_len
        return self.row.requests * per_request / self.seconds

    def record(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "row": str(self.row),
            "ms_per_step": self.ms_per_step,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass
class Report:
    """All figures of one engine."""

    dtype: str
    engine_bytes: int
    build_seconds: float | None
    load_seconds: float = 0.0
    first_token_seconds: float = 0.0
    """Of the first request after loading, 128 tokens"""
    device: str = ""
    results: list[Result] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "results": [result.record() for result in self.results]}

    def show(self) -> None:
        built = "reused" if self.build_seconds is None else f"built in {self.build_seconds:.1f} s"
        print(
            f"\n{self.dtype}: {built}, {self.engine_bytes / 1e9:.1f} GB, loaded in {self.load_seconds:.1f} s, ", end=""
        )
        print(f"first token {1e3 * self.first_token_seconds:.0f} ms after that; {self.device}")
        print(f"{'requests×in/out':>16} {'s':>9} {'ms/step':>9} {'tok/s':>9} {'TTFT ms':>9} {'vLLM s':>9} {'speed':>6}")
        for result in self.results:
            vllm = result.vllm_seconds
            peer = f"{vllm:9.4f} {vllm / result.seconds:6.2f}" if vllm is not None else f"{'-':>9} {'-':>6}"
            note = f"  {result.preemptions} preempted" if result.preemptions else ""
            print(
                f"{result.row!s:>16} {result.seconds:9.4f} {result.ms_per_step:9.3f} {result.tokens_per_second:9.0f} "
                f"{1e3 * result.first_token_seconds:9.1f} {peer}{note}"
            )
        if self.skipped:
            print(f"skipped, the time was over: {', '.join(self.skipped)}")


class Load:
    """A loaded engine and the requests that it is measured with."""

    def __init__(self, engine: Engine, config: ExecutorConfig) -> None:
        begin = time.perf_counter()
        self.manager = RuntimeManager(engine.rank_file(), config, engine.manifest.eos_token_ids)
        self.load_seconds = time.perf_counter() - begin
        self._rng = np.random.default_rng(0)

    def run(self, row: Row) -> tuple[float, float]:
        """Seconds until all requests have ended, and the median of their times to the first token."""
        sampling = SamplingParams(max_tokens=row.output_len, temperature=0.0, ignore_eos=True)
        prompts = self._rng.integers(0, self.manager.vocab_size, (row.requests, row.input_len)).tolist()
        requests = [ManagerRequest(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts]
        first_tokens: list[float] = []
        tokens = 0
        begin = time.perf_counter()
        for request in requests:
            self.manager.submit(request)
        while len(first_tokens) < row.requests:
            responses = self.manager.poll(POLL_SECONDS)
            if not responses:
                raise SystemExit(f"{row}: no news for {POLL_SECONDS:.0f} s; the runtime hangs")
            for response in responses:
                if response.error_message is not None:
                    raise SystemExit(f"{row}: {response.error_kind}: {response.error_message}")
                tokens += len(response.token_ids)
                if response.finish_reason is not None and response.timings is not None:
                    first_tokens.append(response.timings.first_token_seconds)
        seconds = time.perf_counter() - begin
        if tokens != row.requests * row.output_len:
            raise SystemExit(f"{row}: {tokens} tokens came, {row.requests * row.output_len} were asked for")
        return seconds, float(np.median(first_tokens))

    def measure(self, row: Row, vllm_seconds: float | None) -> Result:
        """The better of `RUNS` runs after a short one."""
        self.run(Row(row.requests, row.input_len, min(row.output_len, 4)))
        before = self.manager.stats()
        seconds, first_token = min(self.run(row) for _ in range(RUNS))
        after = self.manager.stats()
        steps, preemptions = (after.steps - before.steps) // RUNS, after.preemptions - before.preemptions
        return Result(row, seconds, first_token, steps, preemptions, vllm_seconds)


def device() -> str:
    """The GPU as it is right now: clocks are those of a card at work."""
    names = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu,memory.used"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "no nvidia-smi"
    values = done.stdout.splitlines()[0].split(", ")
    return ", ".join(f"{name} {value}" for name, value in zip(names.split(","), values, strict=False))


def measure(engine: Engine, rows: Sequence[Row], label: str, build_seconds: float | None, end: float) -> Report:
    """Loads an engine and measures the rows until the time `end`."""
    limits, parallel = engine.manifest.limits, engine.manifest.parallel
    per_block = limits.tokens_per_block
    blocks = [min(row.requests, limits.max_batch_size) * (-(-row.length // per_block) + 1) for row in rows]
    config = ExecutorConfig(kv_cache_memory=f"{max(blocks) * per_block}tokens", prefix_caching=False)
    size = sum(entry.bytes for entry in engine.manifest.files.values())
    report = Report(label, size, build_seconds)
    load = Load(engine, config)
    try:
        report.load_seconds = load.load_seconds
        report.first_token_seconds = load.run(Row(1, min(128, limits.max_seq_len - 1), 1))[0]
        for row in rows:
            if time.perf_counter() > end:
                report.skipped.append(str(row))
                continue
            vllm = VLLM.get(label, {}).get(row) if parallel.tp * parallel.pp == 1 else None
            report.results.append(load.measure(row, vllm))
            print(f"  {label} {row}: {report.results[-1].seconds:.4f} s", file=sys.stderr, flush=True)
        report.device = device()
    finally:
        load.manager.shutdown()
    return report


def label_of(engine: Engine) -> str:
    """bf16, fp8, …: what holds most of the weights."""
    formats = engine.manifest.precision.weight_formats
    return max(formats, key=lambda name: formats[name])


def built(arguments: argparse.Namespace, shape: LlamaShape, rows: Sequence[Row]) -> list[Report]:
    """Makes the checkpoint, then builds, measures and removes one engine after the other."""
    if arguments.work is not None:
        arguments.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="aotllm-bench-", dir=arguments.work))
    end = time.perf_counter() + arguments.seconds
    reports = []
    try:
        begin = time.perf_counter()
        size = write_random_llama(work / "checkpoint", shape)
        print(f"checkpoint: {size / 1e9:.1f} GB in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        for dtype in ("bf16", "fp8") if arguments.dtype == "both" else (arguments.dtype,):
            options = BuildOptions(
                target=arguments.target,
                dtype="bf16",
                kv_cache_dtype=arguments.kv_cache_dtype,
                quantize=None if dtype == "bf16" else dtype,
                quantize_lm_head=arguments.quantize_lm_head and dtype != "bf16",
                tp=arguments.tp,
                pp=arguments.pp,
                max_batch_size=max(row.requests for row in rows),
                max_num_tokens=arguments.max_num_tokens,
                max_seq_len=max(row.length for row in rows),
            )
            made = build(work / "checkpoint", work / dtype, options)
            if arguments.tune:
                tune_begin = time.perf_counter()
                tune(work / dtype)
                print(f"{dtype}: tuned in {time.perf_counter() - tune_begin:.1f} s", file=sys.stderr, flush=True)
            stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in made.stage_seconds.items())
            print(f"{dtype}: built in {made.seconds:.1f} s ({stages})", file=sys.stderr, flush=True)
            # What the build has just written is not read once more for its digests.
            reports.append(measure(open_engine(work / dtype, verify=False), rows, dtype, made.seconds, end))
            reports[-1].show()
            if not arguments.keep:
                shutil.rmtree(work / dtype)
    finally:
        if arguments.keep:
            print(f"kept: {work}", file=sys.stderr)
        else:
            shutil.rmtree(work, ignore_errors=True)
    return reports


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, help="measure this engine and build none")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bf16", "fp8", "both"), help="both on target cuda, else bf16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantize-lm-head", action="store_true", help="the head in FP8, too (vLLM's is in bf16)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, on GPUs 0, 1, …")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages, likewise")
    parser.add_argument("--tune", action="store_true", help="choose kernels by measurement first (aotllm tune)")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(map(str, QUICK_ROWS))}")
    parser.add_argument("--rows", type=Row.parse, nargs="+", metavar="REQUESTSxIN/OUT", help="other rows")
    parser.add_argument("--max-num-tokens", type=int, default=8192, help="most tokens of a step (8192)")
    parser.add_argument("--seconds", type=float, default=SECONDS_ALLOWED, help="begin no row after these (480)")
    parser.add_argument("--work", type=Path, help="folder for checkpoint and engines; default: the system's")
    parser.add_argument("--keep", action="store_true", help="keep them")
    parser.add_argument("--json", type=Path, help="write all figures there")
    for size in fields(LlamaShape):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    arguments = parser.parse_args()
    if arguments.dtype is None:
        arguments.dtype = "both" if arguments.target == "cuda" else "bf16"
    return arguments


def main() -> None:
    """Runs the benchmark."""
    arguments = parse()
    rows = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
    shape = LlamaShape(**{size.name: getattr(arguments, size.name) for size in fields(LlamaShape)})
    if arguments.engine is not None:
        engine = open_engine(arguments.engine, verify=False)
        fitting = [row for row in rows if row.length <= engine.manifest.limits.max_seq_len]
        reports = [measure(engine, fitting, label_of(engine), None, time.perf_counter() + arguments.seconds)]
        reports[0].show()
    else:
        reports = built(arguments, shape, rows)
    if shape != LlamaShape():
        print("\nNot the shape that vLLM's figures are for: do not compare.")
    if arguments.json is not None:
        record = {"shape": asdict(shape), "reports": [report.record() for report in reports]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except AotllmError as error:
        sys.exit(f"error: {error.message}")
