"""`tune`: measure which kernels are fastest for an engine on the machine that it will run on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotllm.cuda_libraries import find_cublaslt
from aotllm.engines import Engine, open_engine
from aotllm.engines.bundle import TACTICS_FILE
from aotllm.engines.manifest import FileEntry
from aotllm.engines.verification import file_sha256
from aotllm.errors import EngineError, EngineIncompatible, InvalidRequest

TACTICS_VERSION = 1
DEFAULT_SECONDS = 20.0


@dataclass(frozen=True)
class TunedTactic:
    """The fastest kernel for launches of at most `max_rows` rows."""

    max_rows: int
    kernel: str
    seconds: float
    """At `max_rows` rows, weights from memory; target cpu: of one matrix in a step (gate and up: of both)"""


@dataclass(frozen=True)
class TunedLinear:
    """What was found for matrices of one format and shape."""

    format: str
    n: int
    k: int
    tactics: tuple[TunedTactic, ...]


@dataclass(frozen=True)
class TunedStep:
    """How steps of at most `max_rows` rows run on target cpu."""

    max_rows: int
    threads: int
    seconds: float
    """Of a step of `max_rows` rows, as chosen"""
    default_seconds: float
    """The same by the defaults, in turns with it"""


@dataclass(frozen=True)
class Tuning:
    """What `tune` chose. All but `linears` is of target cpu."""

    linears: tuple[TunedLinear, ...]
    """cuda: of every matrix; cpu: of those for which something else than the default is faster"""
    device: str | None = None
    """The CPU and the ISA of its kernels: on others the engine keeps to the defaults"""
    threads: int | None = None
    """That there were: with others the engine keeps to the defaults"""
    own_rows: int | None = None
    """With as many rows for each thread, threads divide a step by rows instead of by columns of the matrices"""
    steps: tuple[TunedStep, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Tuning:
        """From the contents of tactics.json."""
        return cls(
            tuple(
                TunedLinear(r["format"], r["n"], r["k"], tuple(TunedTactic(**tactic) for tactic in r["tactics"]))
                for r in record["linears"]
            ),
            record.get("device"),
            record.get("threads"),
            record.get("own_rows"),
            tuple(TunedStep(**step) for step in record.get("steps", ())),
        )


def tune(
    path: str | Path, device: int | None = None, num_threads: int | None = None, seconds: float | None = None
) -> Tuning:
    """Times the kernels of an engine's matrices and stores the choices in its folder (`tactics.json`).

    Loading the engine takes them in place of the defaults. On target cuda that takes some seconds for each shape; the
    weights are made up, so an engine of any size is tuned in a minute or so. On target cpu steps of the engine itself
    are timed; what is chosen never changes a result.

    Args:
        path: the engine's folder.
        device: of target cuda: ordinal of the GPU; None = 0.
        num_threads: of target cpu: threads that the engine will run on; None = as many as an executor takes.
        seconds: of target cpu: about how long it may take; None = DEFAULT_SECONDS.

    Raises:
        EngineError: the engine is missing or damaged, or its folder cannot be written.
        EngineIncompatible: it is not for this machine or for a target without kernels to choose from, or this
            installation has no CUDA.
        InvalidRequest: an argument that the engine's target does not take.
    """
    engine = open_engine(path, verify=False)
    target = engine.manifest.target.name
    if target == "cpu":
        _refuse(target, device=device)
        record = _tune_cpu(engine, num_threads or 0, DEFAULT_SECONDS if seconds is None else seconds)
    elif target == "cuda":
        _refuse(target, num_threads=num_threads, seconds=seconds)
        record = {"linears": _tune_cuda(engine, device or 0)}
    else:
        raise EngineIncompatible(
            f"{path}: the engine is for target {target!r}; only engines of targets cpu and cuda are tuned"
        )
    store_tactics(engine, json.dumps({"version": TACTICS_VERSION, **record}, indent=1))
    return Tuning.from_record(record)


def stored_tactics(folder: Path) -> str:
    """The text of what `aotllm tune` stored in an engine's folder; empty where it never ran.

    Raises:
        EngineError: the file cannot be read.
    """
    path = folder / TACTICS_FILE
    if not path.exists():
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise EngineError(f"{path}: cannot be read: {reason}; run 'aotllm tune' again, or build the engine") from None


def _refuse(target: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            other = "cuda" if target == "cpu" else "cpu"
            raise InvalidRequest(
                f"{name}: got {value}, but the engine is for target {target}; only {other} takes it", name
            )


def _tune_cpu(engine: Engine, num_threads: int, seconds: float) -> dict[str, Any]:
    from aotllm import _runtime

    return _runtime.tune_cpu(str(engine.rank_file(0)), num_threads, seconds)


def _tune_cuda(engine: Engine, device: int) -> Sequence[dict[str, Any]]:
    from aotllm import _runtime

    return _runtime.tune(str(engine.rank_file(0)), device, find_cublaslt())


def store_tactics(engine: Engine, text: str) -> None:
    """Writes the file, then the manifest that knows it; a reader in between sees the old engine. Raises EngineError."""
    path = engine.path / TACTICS_FILE
    staged = path.with_suffix(".new")
    try:
        staged.write_text(text + "\n", encoding="utf-8")
        entry = FileEntry(bytes=staged.stat().st_size, sha256=file_sha256(staged))
        os.replace(staged, path)
        files = {**engine.manifest.files, TACTICS_FILE: entry}
        engine.manifest.model_copy(update={"files": files}).write(engine.path)
    except OSError as error:
        raise EngineError(f"{engine.path}: cannot be written: {error.strerror}; tune a copy of the engine") from error
