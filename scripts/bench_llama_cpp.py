#!/usr/bin/env python3
"""aotllm against llama.cpp's own tools on the same GGUF files: both run in turns, and each turn gives a ratio.

    python scripts/bench_llama_cpp.py --llama-cpp DIR                     # prefill 512, decode at batch 1, 8 and 64
    python scripts/bench_llama_cpp.py --cells all --markdown table.md     # PyPI's llama.cpp, built on the first run
    python scripts/bench_llama_cpp.py --types q4_0 --cells 'batch*' --repeats 3 --generate 32
    python scripts/bench_llama_cpp.py --gguf model.gguf --cells decode,decode@1024

The types are made by llama-quantize from the Q4_1 file that `scripts/get_model.py smollm2` fetches. Cells:

    prefill512 prefill2048      llama-bench -p N
    decode decode@1024 decode@2048   llama-bench -n 128 -d DEPTH: one sequence
    batch2 … batch64            llama-batched-bench: prompts of 128 tokens, 128 decoded for each
    server1 server8 server32    llama-server and `aotllm serve`: output tokens/s of so many clients
    load                        seconds of a process that loads the model, computes one token, and ends
    prefix                      seconds until 8 clients, whose prompts begin with the same 1,024 tokens, have a token
    start                       seconds from the start of a server to its first token
    memory                      MiB (proportional set size) of a server, 8 sequences of 2,048 tokens filled

Ours are the runner's steps for the first three, which return logits and sample nothing, as the peer's do. A ratio above
1 means that aotllm is faster, or smaller, whatever the unit. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from foreign_load import ForeignLoad  # noqa: E402
from get_model import get_model  # noqa: E402
from llama_cpp import LlamaCpp, LlamaCppError, build_from_pypi  # noqa: E402
from runner_speed import RunnerSpeed  # noqa: E402
from server_peers import ServerPeers, seconds_of  # noqa: E402

TYPES = ("q4_1", "q4_0", "q8_0", "q4_k_m", "bf16")
PREFILLS = (512, 2048)
DEPTHS = {"decode": 0, "decode@1024": 1024, "decode@2048": 2048}
BATCHES = (2, 4, 8, 16, 32, 64)
CLIENTS = (1, 8, 32)
BATCH_PROMPT = 128
CELLS = (
    *(f"prefill{length}" for length in PREFILLS),
    *DEPTHS,
    *(f"batch{size}" for size in BATCHES),
    *(f"server{clients}" for clients in CLIENTS),
    *("prefix", "load", "start", "memory"),
)
DEFAULT_CELLS = "prefill512,decode,batch8,batch64"
LESS_IS_BETTER = {"prefix": "s", "load": "s", "start": "s", "memory": "MiB"}


@dataclass
class Cell:
    """One figure of one model, of both sides; a pair per turn."""

    model: str
    name: str
    theirs: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    others: float = 0.0
    """Most CPUs that other programs kept busy during one of the measurements"""

    @property
    def unit(self) -> str:
        return LESS_IS_BETTER.get(self.name, "tok/s")

    @property
    def ratios(self) -> list[float]:
        """Per turn; above 1 where ours is better."""
        pairs = zip(self.theirs, self.ours, strict=True)
        if self.name in LESS_IS_BETTER:
            return [theirs / ours for theirs, ours in pairs]
        return [ours / theirs for theirs, ours in pairs]

    def record(self) -> dict[str, Any]:
        values = {"theirs": self.theirs, "ours": self.ours, "ratio": self.ratios}
        return {
            "model": self.model,
            "cell": self.name,
            "unit": self.unit,
            "others": self.others,
            **{name: {**_spread(samples), "samples": samples} for name, samples in values.items()},
        }


def _spread(samples: Sequence[float]) -> dict[str, float]:
    return {"min": min(samples), "median": statistics.median(samples), "max": max(samples)}


def chosen_cells(patterns: str) -> list[str]:
    """The cells that a list of names or patterns such as `batch*` names, in the order of CELLS.

    Raises:
        ValueError: one of them names none.
    """
    if patterns == "all":
        return list(CELLS)
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in CELLS):
            raise ValueError(f"--cells: there is no {pattern!r}; there are {', '.join(CELLS)}")
    return [name for name in CELLS if any(fnmatchcase(name, pattern) for pattern in wanted)]


def table(cells: Sequence[Cell]) -> str:
    """A markdown table: a row per cell, medians with the smallest and largest value."""
    lines = ["| model | cell | | llama.cpp | aotllm | ratio |", "|---|---|---|---|---|---|"]
    for cell in cells:
        digits = 3 if cell.unit == "s" else 0
        values = [_shown(samples, digits) for samples in (cell.theirs, cell.ours)]
        lines.append(f"| {cell.model} | {cell.name} | {cell.unit} | {' | '.join(values)} | {_shown(cell.ratios, 2)} |")
    return "\n".join(lines)


def _shown(samples: Sequence[float], digits: int) -> str:
    low, middle, high = (f"{value:,.{digits}f}" for value in _spread(samples).values())
    return middle if len(samples) == 1 else f"{middle} ({low}–{high})"


class Comparison:
    """Both sides on one file."""

    def __init__(self, peer: LlamaCpp, model: Path, engine: Path, names: Sequence[str], arguments: Any) -> None:
        self._peer, self._model, self._generate = peer, model, arguments.generate
        self._servers = ServerPeers(peer, model, engine, arguments.threads, arguments.requests, arguments.generate)
        self._engine, self._threads = engine, arguments.threads
        prefills = [length for length in PREFILLS if f"prefill{length}" in names]
        batches = [size for size in BATCHES if f"batch{size}" in names]
        depths = [depth for name, depth in DEPTHS.items() if name in names]
        self._runner: RunnerSpeed | None = None
        if prefills or batches or depths:
            self._runner = RunnerSpeed(
                engine,
                arguments.threads,
                depths=depths,
                batches=batches,
                prompt=BATCH_PROMPT,
                generate=self._generate,
                prefills=prefills,
            )

    def sides(self, name: str) -> tuple[Callable[[], float], Callable[[], float]]:
        """What measures a cell: theirs, ours."""
        peer, model, generate, servers = self._peer, self._model, self._generate, self._servers
        if name.startswith("server"):
            clients = int(name.removeprefix("server"))
            return (lambda: servers.their_throughput(clients)), (lambda: servers.our_throughput(clients))
        if name in ("prefix", "start", "memory"):
            return getattr(servers, f"their_{name}"), getattr(servers, f"our_{name}")
        if name == "load":
            return self._their_load, self._our_load
        runner = self._runner
        assert runner is not None
        if name.startswith("prefill"):
            length = int(name.removeprefix("prefill"))
            return (lambda: peer.bench(model, prompt=length)), (lambda: runner.prefill(length))
        if name.startswith("batch"):
            size = int(name.removeprefix("batch"))

            def batched() -> float:
                return peer.batched_bench(model, prompt=BATCH_PROMPT, generate=generate, batch=size).decode_per_second

            return batched, lambda: runner.batch(size)
        depth = DEPTHS[name]
        return (lambda: peer.bench(model, generate=generate, depth=depth)), (lambda: runner.decode(depth))

    def _their_load(self) -> float:
        arguments = ["-p", "0", "-n", "1", "-r", "1", "--no-warmup", "-t", str(self._threads), "-fa", "on"]
        return seconds_of([str(self._peer.tool("llama-bench")), "-m", str(self._model), *arguments])

    def _our_load(self) -> float:
        arguments = ["--raw", "-p", "a", "--max-tokens", "1", "--json", "--num-threads", str(self._threads)]
        return seconds_of([sys.executable, "-m", "aotllm", "run", str(self._engine), *arguments])


def measure(
    comparison: Comparison,
    model: str,
    names: Sequence[str],
    repeats: int,
    others_limit: float,
    on_pair: Callable[[list[Cell]], None],
) -> None:
    """All cells of one model, `repeats` turns; who begins changes from turn to turn.

    Args:
        on_pair: called after each pair with the cells that have one; a run that is killed leaves what was written then.
    """
    cells = [Cell(model, name) for name in names]
    load = ForeignLoad(others_limit)

    def add(cell: Cell, samples: list[float], side: Callable[[], float]) -> None:
        value, others = load.measure(side)
        samples.append(value)
        cell.others = max(cell.others, others)

    for turn in range(repeats):
        for cell in cells:
            theirs, ours = comparison.sides(cell.name)
            order = [(cell.theirs, theirs), (cell.ours, ours)]
            for samples, side in reversed(order) if turn % 2 else order:
                add(cell, samples, side)
            print(
                f"{model} {cell.name}: {cell.theirs[-1]:.2f} {cell.ours[-1]:.2f} {cell.unit}, "
                f"ratio {cell.ratios[-1]:.2f}, others {cell.others:.2f} CPUs",
                file=sys.stderr,
            )
            on_pair([cell for cell in cells if cell.ours])


def make_types(peer: LlamaCpp, types: Sequence[str], folder: Path) -> dict[str, Path]:
    """A file per type; those that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for kind in types:
        source = get_model("smollm2")
        file = source if kind == "q4_1" else folder / f"smollm2-{kind}.gguf"
        if not file.is_file():
            peer.quantize(source, file, kind.upper())
        files[f"smollm2-{kind}"] = file
    return files


def build_engine(model: Path, folder: Path) -> None:
    """With the builder as it is now, whatever is there."""
    command = [sys.executable, "-m", "aotllm", "build", str(model), "-o", str(folder), "--force", "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def about(peer: LlamaCpp, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know of the run."""
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "llama_cpp": peer.version(),
        "machine": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "generate": arguments.generate,
        "load_average": os.getloadavg()[0],
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="llama.cpp's build; default: PyPI's, in --work")
    parser.add_argument("--types", default=",".join(TYPES), help="of SmolLM2-135M, any that llama-quantize knows")
    parser.add_argument("--gguf", type=Path, action="append", default=[], help="a file in place of types; repeatable")
    parser.add_argument("--cells", default=DEFAULT_CELLS, help="names or patterns with commas between, or all")
    parser.add_argument("--repeats", type=int, default=5, help="turns of both sides")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--generate", type=int, default=128, help="tokens decoded per sequence and request")
    parser.add_argument("--requests", type=int, default=64, help="of a server cell")
    parser.add_argument(
        "--others", type=float, default=0.15, help="CPUs that other programs may use before a figure is taken again"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench_llama_cpp", help="types, engines, builds")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="to build llama.cpp")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    arguments = parser.parse_args(argv)
    for name in ("repeats", "threads", "generate", "requests", "jobs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} takes a number from 1 on, got {getattr(arguments, name)}")
    try:
        arguments.names = chosen_cells(arguments.cells)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    """Command line."""
    arguments = parse_arguments()
    try:
        run(arguments)
    except LlamaCppError as error:
        raise SystemExit(f"error: {error}") from None


def run(arguments: argparse.Namespace) -> None:
    """Measure and report; after Ctrl-C what there is."""
    folder = arguments.llama_cpp or build_from_pypi(arguments.work / "llama_cpp", arguments.jobs)
    peer = LlamaCpp(folder, arguments.threads)
    types = arguments.types.lower().split(",")
    models = {file.stem: file for file in arguments.gguf} or make_types(peer, types, arguments.work / "gguf")
    head = about(peer, arguments)
    done: list[Cell] = []
    cells: list[Cell] = []

    def on_pair(measured: list[Cell]) -> None:
        cells[:] = [*done, *measured]
        write(cells, head, arguments)

    try:
        for name, file in models.items():
            engine = arguments.work / "engines" / name
            build_engine(file, engine)
            comparison = Comparison(peer, file, engine, arguments.names, arguments)
            measure(comparison, name, arguments.names, arguments.repeats, arguments.others, on_pair)
            done = list(cells)
    except KeyboardInterrupt:
        print("interrupted: this is what was measured", file=sys.stderr)
    for cell in cells:
        if cell.others > arguments.others:
            print(f"{cell.model} {cell.name}: others kept {cell.others:.2f} CPUs busy; measure again", file=sys.stderr)
    print("\n" + ", ".join(f"{key} {value}" for key, value in head.items()) + "\n\n" + table(cells))


def write(cells: Sequence[Cell], head: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The files that were asked for."""
    if arguments.markdown:
        arguments.markdown.write_text(table(cells) + "\n", encoding="utf-8")
    if arguments.json:
        value = {**head, "cells": [cell.record() for cell in cells]}
        arguments.json.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
