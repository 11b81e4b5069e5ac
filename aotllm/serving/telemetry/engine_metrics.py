"""`engine_families`: what engines tell of themselves, read when somebody asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from aotllm.kv_memory import KvMemory
from aotllm.serving.engine import ServingEngine
from aotllm.serving.repository import Repository
from aotllm.serving.telemetry.request_metrics import ENGINE, LABELS, MODEL_VERSION, PREFIX
from aotllm.stats import ExecutorStats

_PATIENCE = 2.0
"""Seconds that an engine has to answer; one that hangs must not take the metrics of the others with it"""

_GAUGES = {
    "num_requests_running": ("Sequences that hold KV blocks.", "running"),
    "num_requests_waiting": ("Sequences that wait, preempted ones included.", "queued"),
    "kv_blocks_capacity": ("KV blocks of the device.", "blocks_total"),
    "kv_blocks_used": ("KV blocks that sequences hold.", "blocks_used"),
    "kv_blocks_cached": ("KV blocks that are free but for the prefix cache.", "blocks_cached"),
    "kv_host_blocks_used": ("KV blocks in the memory of the host.", "host_blocks_used"),
}
_COUNTERS = {
    "num_preemptions": ("Times that a sequence gave its KV blocks up.", "preemptions"),
    "prefix_cache_queries": ("Tokens that were looked for in the prefix cache.", "cache.queried_tokens"),
    "prefix_cache_hits": ("Tokens that were found there.", "cache.hit_tokens"),
    "kv_blocks_evicted": ("KV blocks lost from the prefix cache.", "cache.evicted_blocks"),
    "kv_blocks_offloaded": ("KV blocks moved to the memory of the host.", "cache.offloaded_blocks"),
    "kv_blocks_onloaded": ("KV blocks moved back to the device.", "cache.onloaded_blocks"),
    "spec_decode_num_draft_tokens": ("Tokens that speculation proposed.", "draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Of those, tokens that the model agreed with.", "accepted_tokens"),
    "engine_steps": ("Steps of the engine.", "steps"),
    "engine_stuck_steps": ("Steps that took so long that the watchdog reported them.", "stuck_steps"),
    "engine_context_tokens": ("Prompt tokens computed, again after a preemption included.", "context_tokens"),
    "engine_generated_tokens": ("Tokens sampled, or forced by a grammar.", "generated_tokens"),
}


@dataclass(frozen=True)
class EngineReading:
    """What one engine said."""

    name: str
    engine: ServingEngine
    alive: bool
    stats: ExecutorStats | None
    memory: KvMemory | None


async def read_engines(repository: Repository) -> list[EngineReading]:
    """All loaded engines. One that does not answer has no figures."""
    engines = dict(repository.engines())
    return list(await asyncio.gather(*(_read(name, engine) for name, engine in engines.items())))


async def _read(name: str, engine: ServingEngine) -> EngineReading:
    try:
        both = asyncio.gather(engine.stats_async(), engine.memory_async())
        stats, memory = await asyncio.wait_for(both, _PATIENCE)
    except Exception:  # whatever is wrong with it: that it is down is the metric
        return EngineReading(name, engine, False, None, None)
    return EngineReading(name, engine, engine.alive, stats, memory)


def engine_families(readings: Iterable[EngineReading]) -> list[Metric]:
    """Metrics of vLLM's names, of Triton's, and some of our own. What a runtime does not count is left out."""
    readings = list(readings)
    families: list[Metric] = [_up(readings)]
    for name, (doc, field) in _GAUGES.items():
        families.append(_family(GaugeMetricFamily(PREFIX + name, doc, labels=LABELS), readings, field))
    for name, (doc, field) in _COUNTERS.items():
        families.append(_family(CounterMetricFamily(PREFIX + name, doc, labels=LABELS), readings, field))
    families += [_usage(readings), _iteration_tokens(readings), _cache_config(readings), _lora(readings)]
    families += _triton(readings)
    return [family for family in families if family.samples]


def figure(stats: ExecutorStats, path: str) -> float | None:
    """A counter by its name, `cache.hit_tokens` for a nested one; None where the runtime has none of that name."""
    value: Any = stats.counters
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return float(value) if isinstance(value, (int, float)) else None


def _answers(readings: Iterable[EngineReading]) -> Iterable[tuple[EngineReading, ExecutorStats, KvMemory]]:
    for reading in readings:
        if reading.stats is not None and reading.memory is not None:
            yield reading, reading.stats, reading.memory


def _family(family: Any, readings: Iterable[EngineReading], field: str) -> Metric:
    for reading, stats, _ in _answers(readings):
        value = figure(stats, field)
        if value is not None:
            family.add_metric([reading.name, ENGINE], value)
    metric: Metric = family
    return metric


def _up(readings: Iterable[EngineReading]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}engine_up", "1 = the engine takes requests.", labels=LABELS)
    for reading in readings:
        family.add_metric([reading.name, ENGINE], float(reading.alive))
    return family


def _usage(readings: Iterable[EngineReading]) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}kv_cache_usage_perc", "Share of the device's KV blocks that sequences hold, 0 to 1.", labels=LABELS
    )
    for reading, stats, _ in _answers(readings):
        family.add_metric([reading.name, ENGINE], stats.kv_usage)
    return family


def _iteration_tokens(readings: Iterable[EngineReading]) -> Metric:
    """The runtime keeps totals, not the distribution: a mean per step, `rate(…_sum) / rate(…_count)`."""
    family = SummaryMetricFamily(
        f"{PREFIX}iteration_tokens_total", "Prompt and generated tokens per step of the engine.", labels=LABELS
    )
    for reading, stats, _ in _answers(readings):
        family.add_metric([reading.name, ENGINE], stats.steps, stats.context_tokens + stats.generated_tokens)
    return family


def _cache_config(readings: Iterable[EngineReading]) -> Metric:
    """Labels as of vLLM's CacheConfig, which inference gateways read: block_size in tokens, num_gpu_blocks = those of
    the device, whatever it is."""
    names = (*LABELS, "block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_bytes")
    family = GaugeMetricFamily(f"{PREFIX}cache_config_info", "What the KV memory is; always 1.", labels=names)
    for reading, _, memory in _answers(readings):
        group = memory.groups[0]
        values = (memory.tokens_per_block, group.device_blocks, group.host_blocks, memory.device_bytes)
        family.add_metric([reading.name, ENGINE, *map(str, values)], 1)
    return family


def _lora(readings: Iterable[EngineReading]) -> Metric:
    """Inference gateways route by it. All loaded adapters are at hand for the next step, so all count as running, and
    no other one can be asked for. As in vLLM the value is the time at which this was so."""
    names = (*LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily(f"{PREFIX}lora_requests_info", "Loaded LoRA adapters, and the time.", labels=names)
    for reading, _, _ in _answers(readings):
        adapters = reading.engine.lora_names
        if adapters:
            values = (str(len(adapters)), ",".join(adapters), "")
            family.add_metric([reading.name, ENGINE, *values], time.time())
    return family


def _triton(readings: list[EngineReading]) -> list[Metric]:
    labels = ("model", "version")
    pending = GaugeMetricFamily("nv_inference_pending_request_count", "Sequences that wait.", labels=labels)
    executions = CounterMetricFamily("nv_inference_exec_count", "Steps of the engine.", labels=labels)
    for reading, stats, _ in _answers(readings):
        pending.add_metric([reading.name, MODEL_VERSION], stats.queued)
        executions.add_metric([reading.name, MODEL_VERSION], stats.steps)
    return [pending, executions]
