"""`aotllm inspect`: what is inside an engine."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aotllm.cli.console import print_json, size

if TYPE_CHECKING:
    from aotllm.engines import Engine

_LINEAR_FIELDS = ("linear", "gate", "up", "gate_up", "down")
_DENSE_FIELDS = ("norm", "q_norm", "k_norm", "post_norm", "bias", "gate_bias", "up_bias", "gate_up_bias", "router")


def inspect(
    engine: Annotated[Path, typer.Argument(help="Folder of the engine.", metavar="ENGINE_DIR")],
    all_ops: Annotated[bool, typer.Option("--all", help="One row per op; else equal layers share one.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show an engine's manifest, ops and memory."""
    from aotllm.engines import open_engine

    opened = open_engine(engine, verify=False, to_run=False)
    ops, memory = op_table(opened), memory_plan(opened)
    manifest = opened.manifest.model_dump(mode="json")
    if json:
        print_json({"manifest": manifest, "ops": ops, "memory": memory})
    else:
        _show(manifest, ops if all_ops else _merge_layers(ops), memory)


def op_table(engine: Engine) -> list[dict[str, Any]]:
    """One record per op of the plan: name, layer, shape of its output buffer and matrices, formats, weight bytes. Of
    the ranks of a stage the first one's."""
    parallel = engine.manifest.parallel
    return [op for stage in range(parallel.pp) for op in _ops_of(engine, stage * parallel.tp)]


def _ops_of(engine: Engine, rank: int) -> list[dict[str, Any]]:
    plan = engine.plan(rank)
    sizes = {name: num_bytes for name, (_, _, num_bytes) in engine.tensors(rank).items()}
    table = []
    for op in plan["ops"]:
        matrices = [plan["linears"][op[field]] for field in _LINEAR_FIELDS if op.get(field) is not None]
        # A matrix of the cpu target is made of segments; one of cuda is of one format, perhaps with scales.
        segments = [segment for matrix in matrices for segment in matrix.get("segments", [matrix])]
        names = {segment[field] for segment in segments for field in ("tensor", "scales") if field in segment}
        names |= {op[field] for field in _DENSE_FIELDS if op.get(field) is not None}
        out = op.get("out")
        table.append(
            {
                "op": op["op"],
                "layer": op.get("layer"),
                "out": plan["buffers"][out]["name"] if out is not None else None,
                "width": plan["buffers"][out]["width"] if out is not None else None,
                "matrices": [[matrix["n"], matrix["k"]] for matrix in matrices],
                "formats": sorted({segment["format"] for segment in segments}),
                "weight_bytes": sum(sizes[name] for name in names),
            }
        )
    return table


def memory_plan(engine: Engine) -> dict[str, int]:
    """What a rank takes when loaded, in bytes. The KV figures are for one sequence; the pool's size is chosen
    when an executor starts."""
    memory, limits = engine.manifest.memory, engine.manifest.limits
    return {
        "weights": memory.weights,
        "arena": memory.arena,
        "kv_per_token": memory.kv_per_token,
        "kv_per_block": memory.kv_per_token * limits.tokens_per_block,
        "kv_at_max_seq_len": memory.kv_per_token * limits.max_seq_len,
    }


def _merge_layers(ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that are equal but for the layer become one, in order of first appearance, with their count and the layers
    (where ops tell) as `0-2, 5`."""

    def key(op: dict[str, Any]) -> str:
        return repr([(name, value) for name, value in op.items() if name != "layer"])

    groups: dict[str, list[dict[str, Any]]] = {}
    for op in ops:
        groups.setdefault(key(op), []).append(op)
    return [
        group[0] | {"count": len(group), "layer": _ranges([op["layer"] for op in group if op["layer"] is not None])}
        for group in groups.values()
    ]


def _ranges(numbers: list[int]) -> str:
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _show(manifest: dict[str, Any], ops: list[dict[str, Any]], memory: dict[str, int]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)  # a file or a pipe has no width of its own
    facts = Table(title="Engine", title_justify="left", show_header=False)
    for name, value in _flatten(manifest):
        facts.add_row(name, escape(value))
    table = Table(title="Ops", title_justify="left")
    table.add_column("op", no_wrap=True, overflow="fold")
    for heading in ("layers", "out", "matrices [n, k]", "formats"):
        table.add_column(escape(heading))
    for heading in ("weights", "ops", "in all"):
        table.add_column(heading, justify="right")
    for op in ops:
        count = op.get("count", 1)
        table.add_row(
            op["op"],
            "" if op["layer"] is None else str(op["layer"]),
            escape("logits" if op["out"] is None else f"{op['out']} [tokens, {op['width']}]"),
            escape(" ".join(f"[{n}, {k}]" for n, k in op["matrices"])),
            " ".join(op["formats"]),
            size(op["weight_bytes"]),
            str(count),
            size(op["weight_bytes"] * count),
        )
    plan = Table(title="Memory", title_justify="left", show_header=False)
    for name, num_bytes in memory.items():
        plan.add_row(name, size(num_bytes))
    for part in (facts, table, plan):
        console.print(part)


def _flatten(record: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in record.items():
        if prefix == "files.":
            rows.append((prefix + name, f"{size(value['bytes'])}  sha256 {value['sha256'][:16]}…"))
        elif isinstance(value, dict):
            rows += _flatten(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows
