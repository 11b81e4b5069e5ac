"""`aotllm tune`: choose kernels by measurement."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from aotllm.cli.console import print_json


def tune(
    engine: Annotated[Path, typer.Argument(help="Folder of an engine of target cuda.", metavar="ENGINE_DIR")],
    device: Annotated[int, typer.Option("--device", help="GPU, by its number among the visible ones.", min=0)] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the kernels of an engine's matrices on this GPU and keep the fastest in the engine."""
    from aotllm.tuning import tune as tune_engine

    linears = tune_engine(engine, device)
    if json:
        print_json({"engine": str(engine), "linears": [asdict(linear) for linear in linears]})
        return
    print(f"{'format':<10} {'matrix':>16} {'rows':>6} {'kernel':<12} {'µs':>9}")
    for linear in linears:
        for tactic in linear.tactics:
            print(
                f"{linear.format:<10} {f'{linear.n} × {linear.k}':>16} {tactic.max_rows:>6} {tactic.kernel:<12} "
                f"{1e6 * tactic.seconds:>9.1f}"
            )
