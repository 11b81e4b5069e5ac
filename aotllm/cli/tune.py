"""`aotllm tune`: choose kernels by measurement."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aotllm.cli.console import print_json

if TYPE_CHECKING:
    from aotllm.tuning import Tuning


def tune(
    engine: Annotated[Path, typer.Argument(help="Folder of an engine of target cpu or cuda.", metavar="ENGINE_DIR")],
    device: Annotated[
        int | None,
        typer.Option("--device", help="Target cuda: GPU, by its number among the visible ones; default 0.", min=0),
    ] = None,
    num_threads: Annotated[
        int | None,
        typer.Option(
            "--num-threads",
            "-t",
            help="Target cpu: threads that the engine will run on; default: as many as it would take.",
            min=1,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Target cpu: about how long it may take; default 20.", min=1.0),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the kernels of an engine's matrices on this machine and keep the fastest in the engine.

    Target cpu: also how many threads take part, by the rows of a step. Results stay the same bit for bit.
    """
    from aotllm.tuning import tune as tune_engine

    tuning = tune_engine(engine, device, num_threads, seconds)
    if json:
        present = {name: value for name, value in asdict(tuning).items() if value not in (None, ())}
        print_json({"engine": str(engine), "linears": [], **present})
        return
    if tuning.steps:
        _print_steps(tuning)
    _print_linears(tuning)


def _print_steps(tuning: Tuning) -> None:
    print(f"{tuning.device}; {tuning.threads} threads; rows are a thread's own from {tuning.own_rows} each")
    print(f"{'rows':>6} {'threads':>8} {'default ms':>11} {'tuned ms':>9} {'gain':>7}")
    for step in tuning.steps:
        gain = step.default_seconds / step.seconds - 1
        print(
            f"{step.max_rows:>6} {step.threads:>8} {1e3 * step.default_seconds:>11.3f} {1e3 * step.seconds:>9.3f} "
            f"{gain:>7.1%}"
        )
    if not tuning.linears:
        print("No other kernel than the default is faster for any matrix.")


def _print_linears(tuning: Tuning) -> None:
    if not tuning.linears:
        return
    width = max(12, *(len(tactic.kernel) for linear in tuning.linears for tactic in linear.tactics))
    print(f"{'format':<10} {'matrix':>16} {'rows':>6} {'kernel':<{width}} {'µs':>9}")
    for linear in tuning.linears:
        for tactic in linear.tactics:
            print(
                f"{linear.format:<10} {f'{linear.n} × {linear.k}':>16} {tactic.max_rows:>6} {tactic.kernel:<{width}} "
                f"{1e6 * tactic.seconds:>9.1f}"
            )
