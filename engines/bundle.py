"""`Engine`: an engine folder, opened and checked; `staged_folder`: one being written, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aotllm.engines.manifest import Manifest, read_manifest
from aotllm.engines.verification import Verification, VerifiedFiles, file_sha256
from aotllm.errors import EngineError, EngineIncompatible

if TYPE_CHECKING:
    from aotllm.tokenization import Tokenizer

RUNNABLE_TARGETS = ("cpu", "cuda")
TOKENIZER_FILE = "tokenizer.json"
TOKENS_FILE = "tokenizer.tokens"
"""The same as tables, for tokenizers that can be; absent for others"""
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG_FILE = "generation_config.json"
GRAPH_FILE = "graph.onnx"
TACTICS_FILE = "tactics.json"


@dataclass(frozen=True)
class Engine:
    """An engine folder whose manifest has been checked, and whose files have been where `open_engine` verified them."""

    path: Path
    manifest: Manifest
    verification: Verification | None = field(default=None, compare=False, repr=False)
    """Of an engine whose digests are being compared: to be waited for before anything is made of its files' contents"""

    def rank_file(self, rank: int = 0) -> Path:
        """The weights and plan of one rank."""
        return self.path / rank_file_name(rank)

    def plan(self, rank: int = 0) -> dict[str, Any]:
        """The plan of a rank, as `docs/engine_format.md` defines it. Raises EngineError."""
        from aotllm.engines.rank_file import read_header

        text = read_header(self.rank_file(rank)).get("__metadata__", {}).get("plan")
        try:
            plan = json.loads(text)
        except (TypeError, ValueError):
            raise EngineError(f"{self.rank_file(rank)}: holds no plan in its metadata; the file is damaged") from None
        if not isinstance(plan, dict):
            raise EngineError(f"{self.rank_file(rank)}: the plan is not a JSON object; the file is damaged")
        return plan

    def tensors(self, rank: int = 0) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Name → (dtype, shape, bytes) of the tensors in a rank's file."""
        from aotllm.engines.rank_file import PAD_PREFIX, read_header

        header = read_header(self.rank_file(rank))
        return {
            name: (record["dtype"], tuple(record["shape"]), record["data_offsets"][1] - record["data_offsets"][0])
            for name, record in header.items()
            if name != "__metadata__" and not name.startswith(PAD_PREFIX)
        }

    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer with its chat template."""
        from aotllm.tokenization import Tokenizer

        return Tokenizer.from_folder(self.path, self.manifest.bos_token, self.manifest.eos_token)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Sampling defaults that the checkpoint states; empty where it states none."""
        path = self.path / GENERATION_CONFIG_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def verify(self) -> None:
        """Compares every file with the size and SHA-256 of the manifest. Raises EngineError for the first bad one."""
        for name, entry in self.manifest.files.items():
            _check_size(self.path / name, entry.bytes)
            if (got := file_sha256(self.path / name)) != entry.sha256:
                raise EngineError(
                    f"{self.path / name}: SHA-256 is {got[:16]}…, the manifest says {entry.sha256[:16]}…: "
                    "the file is damaged; copy or build the engine again"
                )


def open_engine(path: str | os.PathLike[str], verify: bool | Literal["beside"] = True, to_run: bool = True) -> Engine:
    """Opens an engine folder.

    Args:
        path: the folder that `aotllm build` wrote.
        verify: read every file once and check its digest (about a second per GB); False checks sizes only. "beside":
            sizes now, and digests on another thread, as `Engine.verification`, unless these very files were found to be
            right before (see `VerifiedFiles`).
        to_run: refuse an engine for a target that this installation cannot run; False opens it to be looked at.

    Raises:
        EngineError: missing or damaged.
        EngineIncompatible: another schema version, or a target that this installation cannot run.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    engine = Engine(folder, manifest)
    if to_run and manifest.target.name not in RUNNABLE_TARGETS:
        raise EngineIncompatible(
            f"{folder}: the engine is for target {manifest.target.name!r}, this installation runs "
            f"{', '.join(RUNNABLE_TARGETS)}; build it again with '--target {RUNNABLE_TARGETS[0]}'"
        )
    if verify is True:
        engine.verify()
        return engine
    for name, entry in manifest.files.items():
        _check_size(folder / name, entry.bytes)
    return _verified_beside(engine) if verify == "beside" else engine


def _verified_beside(engine: Engine) -> Engine:
    files = VerifiedFiles(engine.path, tuple(engine.manifest.files), engine.manifest.digest())
    if files.known():
        return engine

    def check() -> None:
        engine.verify()
        files.remember()

    return replace(engine, verification=Verification(check))


def rank_file_name(rank: int) -> str:
    """Name of a rank's file in its engine's folder."""
    return f"rank{rank}.engine"


def _check_size(path: Path, expected: int) -> None:
    try:
        got = path.stat().st_size
    except FileNotFoundError:
        raise EngineError(f"{path}: is missing, though the manifest lists it; copy or build the engine again") from None
    if got != expected:
        raise EngineError(f"{path}: has {got} bytes, the manifest says {expected}: the file is truncated or damaged")


@contextmanager
def staged_folder(output: Path, replace: bool = False) -> Iterator[Path]:
    """A scratch folder beside `output` that becomes `output` when the block ends well and vanishes when it does not.

    Args:
        output: where the engine shall be.
        replace: put it in place of an engine that is already there; anything else than an engine is never replaced.

    Raises:
        EngineError: `output` exists and may not be replaced, or the disk cannot be written.
    """
    if output.exists() and not (replace and (output / "engine.json").is_file()):
        hint = "it is not an engine" if replace else "choose another path, or replace it with --force"
        raise EngineError(f"{output}: exists already; {hint}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    except OSError as error:
        raise EngineError(f"{output}: cannot be created: {error.strerror}") from None
    try:
        yield stage
        stage.chmod(0o755)
        if output.exists():
            old = stage.with_suffix(".old")
            output.rename(old)
            stage.rename(output)
            shutil.rmtree(old)
        else:
            stage.rename(output)
    except OSError as error:
        raise EngineError(f"{output}: cannot be written: {error.strerror}; nothing was left behind") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
