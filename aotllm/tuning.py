"""`tune`: measure which kernel is fastest for each matrix of a CUDA engine, on the GPU that it will run on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from aotllm.cuda_libraries import find_cublaslt
from aotllm.engines import Engine, open_engine
from aotllm.engines.bundle import TACTICS_FILE
from aotllm.engines.manifest import FileEntry
from aotllm.engines.verification import file_sha256
from aotllm.errors import EngineIncompatible

TACTICS_VERSION = 1


@dataclass(frozen=True)
class TunedTactic:
    """The fastest kernel for launches of at most `max_rows` rows."""

    max_rows: int
    kernel: str
    seconds: float
    """At `max_rows` rows, weights from memory"""


@dataclass(frozen=True)
class TunedLinear:
    """What was found for matrices of one format and shape."""

    format: str
    n: int
    k: int
    tactics: tuple[TunedTactic, ...]


def tune(path: str | Path, device: int = 0) -> list[TunedLinear]:
    """Times the kernels of an engine's matrices and stores the choices in its folder (`tactics.json`).

    Loading the engine takes them in place of the builder's. Takes some seconds for each shape; the weights are made up,
    so an engine of any size is tuned in a minute or so.

    Raises:
        EngineError: the engine is missing or damaged.
        EngineIncompatible: it is not for target cuda or not for this GPU, or this installation has no CUDA.
    """
    from aotllm import _runtime

    engine = open_engine(path, verify=False)
    if engine.manifest.target.name != "cuda":
        raise EngineIncompatible(
            f"{path}: the engine is for target {engine.manifest.target.name!r}; only engines of target cuda are tuned"
        )
    if not _runtime.has_cuda():
        raise EngineIncompatible(
            "this installation of aotllm has no CUDA; install a wheel that was built with "
            "-C cmake.define.AOTLLM_CUDA=ON"
        )
    records = _runtime.tune(str(engine.rank_file(0)), device, find_cublaslt())
    _store(engine, json.dumps({"version": TACTICS_VERSION, "linears": records}, indent=1))
    return [
        TunedLinear(r["format"], r["n"], r["k"], tuple(TunedTactic(**tactic) for tactic in r["tactics"]))
        for r in records
    ]


def _store(engine: Engine, text: str) -> None:
    """Writes the file, then the manifest that knows it; a reader in between sees the old engine."""
    path = engine.path / TACTICS_FILE
    staged = path.with_suffix(".new")
    staged.write_text(text + "\n", encoding="utf-8")
    entry = FileEntry(bytes=staged.stat().st_size, sha256=file_sha256(staged))
    os.replace(staged, path)
    files = {**engine.manifest.files, TACTICS_FILE: entry}
    engine.manifest.model_copy(update={"files": files}).write(engine.path)
