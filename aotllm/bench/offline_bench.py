"""`OfflineBench`: the points of `aotllm bench throughput` and `aotllm bench latency`, measured in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from aotllm.bench.arrivals import Arrivals
from aotllm.bench.load import LoadRun
from aotllm.bench.measures import Measures
from aotllm.bench.offline_engine import OfflineEngine
from aotllm.bench.offline_options import (
    DEFAULT_INPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    LatencyOptions,
    PromptOptions,
    ThroughputOptions,
)
from aotllm.bench.offline_point import OfflineContext, OfflinePoint
from aotllm.bench.offline_prompts import OfflinePrompt, dataset_prompts, random_prompts
from aotllm.bench.options import ReportOptions
from aotllm.bench.result import BenchContext, BenchPoint
from aotllm.errors import InvalidRequest
from aotllm.executor_config import ExecutorConfig
from aotllm.stats import ExecutorStats

_WARMUP_TOKENS = 4
"""Of each answer, in a short run before a batch is measured"""


@dataclass(frozen=True)
class _Load:
    """What one point asks, again in each of its runs."""

    point: OfflinePoint
    prompts: Sequence[OfflinePrompt]
    concurrency: int | None


class OfflineBench:
    """Measures an engine that is loaded.

    Args:
        engine: the engine.
        path: its folder, for the report.
        config: what it was loaded with.
        prompt, report: what was asked for.
        tell: takes a line for people while it goes on.
        on_end: called with the number of ended requests of this run and of all.
    """

    def __init__(
        self,
        engine: OfflineEngine,
        path: Path,
        config: ExecutorConfig,
        prompt: PromptOptions,
        report: ReportOptions,
        *,
        tell: Callable[[str], None],
        on_end: Callable[[int, int | None], None] = lambda ended, all_: None,
    ) -> None:
        self._engine, self._config, self._prompt, self._report = engine, config, prompt, report
        self._tell, self._on_end = tell, on_end
        self._input_len = prompt.input_len or DEFAULT_INPUT_LEN
        self._output_len = prompt.output_len or DEFAULT_OUTPUT_LEN
        self._salts = 0
        self._context = OfflineContext(
            target=engine.manifest.target.name,
            num_threads=config.num_threads,
            load_seconds=engine.load_seconds,
            kv_cache_tokens=engine.manager.memory().tokens,
        )
        self._bench_context = BenchContext(
            backend="offline",
            url=str(path),
            model=engine.manifest.model.name,
            workload="random",
            lengths_by="exact, as token ids",
            tokenizer=None,
            seed=prompt.seed,
            metrics=report.metrics(),
            detailed=report.detailed,
        )

    def throughput(self, options: ThroughputOptions) -> list[OfflinePoint]:
        """A point per concurrency. Raises InvalidRequest for lengths beyond the engine's context."""
        prompts = self._dataset(options) if options.dataset is not None else self._random(options)
        loads = [_Load(OfflinePoint(self._context), prompts, limit) for limit in options.sweep()]
        if options.warmups:
            self._run(prompts[: options.warmups], loads[0].concurrency, self._salt())
        return self._turns(loads, options.repeats)

    def latency(self, options: LatencyOptions) -> list[OfflinePoint]:
        """A point per depth and batch size.

        Raises:
            InvalidRequest: lengths beyond the engine's context, a batch larger than the engine's, or a depth without
                prefix cache.
        """
        self._check_latency(options)
        loads = []
        for depth in options.depths():
            for size in options.sizes():
                prompts = random_prompts(
                    size,
                    vocab_size=self._engine.manager.vocab_size,
                    input_len=depth + self._input_len,
                    output_len=self._output_len,
                    seed=self._prompt.seed,
                )
                loads.append(_Load(OfflinePoint(self._context, size, depth), prompts, size))
        return self._turns(loads, options.repeats, options.warmups)

    def _random(self, options: ThroughputOptions) -> list[OfflinePrompt]:
        prompts = random_prompts(
            options.num_prompts,
            vocab_size=self._engine.manager.vocab_size,
            input_len=self._input_len,
            output_len=self._output_len,
            seed=self._prompt.seed,
            range_ratio=options.range_ratio,
            prefix_len=options.prefix_len,
        )
        self._check_length(max(prompt.num_tokens for prompt in prompts))
        return prompts

    def _dataset(self, options: ThroughputOptions) -> list[OfflinePrompt]:
        given = {
            "input_len": self._prompt.input_len is not None,
            "range_ratio": options.range_ratio > 0,
            "prefix_len": options.prefix_len > 0,
        }
        for name in (name for name, is_given in given.items() if is_given):
            raise InvalidRequest(f"--{name.replace('_', '-')} has no meaning with --dataset", name)
        assert options.dataset is not None
        prompts, left_out = dataset_prompts(
            Path(options.dataset),
            options.num_prompts,
            self._engine.tokenizer,
            output_len=self._prompt.output_len,
            seed=self._prompt.seed,
            max_seq_len=self._engine.manager.max_seq_len,
        )
        if left_out:
            self._tell(f"{left_out} entries of {options.dataset} do not fit in the engine's context and are left out")
        self._bench_context = replace(
            self._bench_context, workload=options.dataset, lengths_by="of the file, by the engine's tokenizer"
        )
        return prompts

    def _check_latency(self, options: LatencyOptions) -> None:
        limit = self._engine.manifest.limits.max_batch_size
        limit = min(limit, self._config.max_batch_size or limit)
        if max(options.sizes()) > limit:
            raise InvalidRequest(
                f"--batch-sizes: the engine runs at most {limit} requests at a time, got {max(options.sizes())}; build "
                "it with a larger --max-batch-size",
                "batch_sizes",
            )
        deepest = max(options.depths())
        if deepest and not self._config.prefix_caching:
            raise InvalidRequest("--depth needs the prefix cache: leave out --no-prefix-caching", "depth")
        self._check_length(deepest + self._input_len + self._output_len)

    def _check_length(self, longest: int) -> None:
        limit = self._engine.manager.max_seq_len
        if longest > limit:
            raise InvalidRequest(
                f"prompt and answer have up to {longest} tokens together, and the engine takes {limit}; see "
                "--input-len and --output-len, or build it with a larger --max-seq-len",
                "input_len",
            )

    def _turns(self, loads: Sequence[_Load], repeats: int, warmups: int = 0) -> list[OfflinePoint]:
        """Every load once per turn, so that a slow moment of the machine does not fall on one of them."""
        for turn in range(repeats):
            for load in loads:
                if self._engine.interrupted:
                    break
                if turn == 0:
                    short = [OfflinePrompt(p.token_ids, min(p.output_len, _WARMUP_TOKENS)) for p in load.prompts]
                    for _ in range(warmups):
                        self._run(short, load.concurrency, self._salt())
                self._measure(load)
        return [load.point for load in loads if load.point.runs]

    def _measure(self, load: _Load) -> None:
        point, salt = load.point, self._salt()
        if point.depth:
            before = [OfflinePrompt(prompt.token_ids[: point.depth], 1) for prompt in load.prompts]
            self._run(before, load.concurrency, salt)
            if self._engine.interrupted:
                return
        preempted = self._preemptions()
        date = datetime.now()
        run = self._run(load.prompts, load.concurrency, salt)
        point.preemptions += self._preemptions() - preempted
        if not run.records:
            return
        measures = Measures.of(
            run.records, run.started, run.duration, self._report.objectives(), self._report.percents()
        )
        point.runs.append(BenchPoint(self._bench_context, Arrivals(), load.concurrency, run, measures, date))

    def _preemptions(self) -> int:
        return ExecutorStats.from_native(self._engine.manager.stats()).preemptions

    def _run(self, prompts: Sequence[OfflinePrompt], concurrency: int | None, salt: str) -> LoadRun:
        ended = 0

        def on_end() -> None:
            nonlocal ended
            ended += 1
            self._on_end(ended, len(prompts))

        return self._engine.run(prompts, concurrency=concurrency, salt=salt, on_end=on_end)

    def _salt(self) -> str:
        """Another one each time: no run finds the prompts of the one before in the prefix cache."""
        self._salts += 1
        return f"bench {self._salts}"
