"""`export_repository`: writes a model repository for Triton."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aotllm
from aotllm.engines import Engine, open_engine
from aotllm.errors import AotllmError, InvalidRequest
from aotllm.export_triton.model_config import model_config
from aotllm.export_triton.model_settings import ENGINE_FOLDER
from aotllm.triton_tensors.models import CLASSIC_MODELS, EITHER, TensorModel

EngineFiles = Literal["copy", "symlink", "path"]
ENGINE_FILES: tuple[EngineFiles, ...] = ("copy", "symlink", "path")

_VERSION = "1"
_MARK = "aotllm_version"
"""Parameter by which a model of ours is told from others"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")

_MODEL_PY = '''"""Written by `aotllm export-triton`: {what}."""

from aotllm.export_triton.{module} import {cls} as TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class ExportOptions:
    """How the repository is to be."""

    name: str | None = None
    """Of the model that holds the engine; None = the name of the engine's folder"""
    aliases: Sequence[str] = tuple(CLASSIC_MODELS)
    """Models that clients of TensorRT-LLM know, which forward to that one"""
    max_batch_size: int | None = None
    """Most prompts of one request; None = as many as the engine runs at a time"""
    decoupled: bool = True
    """Streaming calls, with any number of responses; else plain calls with one response"""
    engine_files: EngineFiles = "copy"
    """copy or symlink them into the repository, or refer to the engine by its absolute path"""
    execution_env: str | None = None
    """Python environment with aotllm, a folder with bin/activate or an archive of conda-pack, for EXECUTION_ENV_PATH;
    None = the environment that Triton is started in"""
    parameters: Mapping[str, str] | None = None
    """More parameters for the model that holds the engine: fields of `ModelSettings` and `ExecutorConfig`"""
    force: bool = False
    """Replace models of ours that are there already"""


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    path: Path
    models: tuple[str, ...]
    """The one that holds the engine first"""
    max_batch_size: int
    decoupled: bool


def export_repository(engine_folder: Path, output: Path, options: ExportOptions | None = None) -> ExportReport:
    """Writes the models for an engine into a model repository, next to those of others that may be there.

    The models are staged beside `output` and renamed into place when all of them are complete; the engine's digests are
    checked, those of a copy once more after it was made.

    Raises:
        EngineError, EngineIncompatible: as `open_engine`.
        InvalidRequest: an option is out of range.
        AotllmError: a model of that name is there already, or the disk cannot be written.
    """
    options = options or ExportOptions()
    engine = open_engine(engine_folder, verify=True)
    name = options.name or engine_folder.resolve().name
    names = (name, *options.aliases)
    max_batch_size = options.max_batch_size or engine.manifest.limits.max_batch_size
    _check(names, options, max_batch_size)
    with _staged_models(output, names, options.force) as stage:
        for model_name in names:
            model = EITHER if model_name == name else CLASSIC_MODELS[model_name]
            _write_model(stage / model_name, model, name, max_batch_size, options, engine)
    return ExportReport(output, names, max_batch_size, options.decoupled)


def _check(names: Sequence[str], options: ExportOptions, max_batch_size: int) -> None:
    if not _NAME.fullmatch(names[0]):
        raise InvalidRequest(
            f"the model's name must be of letters, digits, '_', '-' and '.', got {names[0]!r:.140}; "
            "give another one with --name",
            "name",
        )
    unknown = [alias for alias in options.aliases if alias not in CLASSIC_MODELS]
    if unknown:
        raise InvalidRequest(f"alias must be one of {', '.join(CLASSIC_MODELS)}, got {unknown[0]!r:.80}", "alias")
    if len(set(names)) < len(names):
        raise InvalidRequest(
            f"two models would be named alike: {', '.join(names)}; give the engine another name with --name", "name"
        )
    if not 1 <= max_batch_size < 2**31:
        raise InvalidRequest(f"max_batch_size must be from 1 to {2**31 - 1}, got {max_batch_size}", "max_batch_size")
    if options.engine_files not in ENGINE_FILES:
        raise InvalidRequest(
            f"engine_files must be one of {', '.join(ENGINE_FILES)}, got {options.engine_files!r:.40}", "engine_files"
        )


def _write_model(
    folder: Path, model: TensorModel, engine_model: str, max_batch_size: int, options: ExportOptions, engine: Engine
) -> None:
    holds_engine = folder.name == engine_model
    version = folder / _VERSION
    version.mkdir(parents=True)
    parameters = {_MARK: aotllm.__version__}
    if options.execution_env is not None:
        parameters["EXECUTION_ENV_PATH"] = options.execution_env
    if holds_engine:
        parameters["engine"] = _place_engine(engine, version / ENGINE_FOLDER, options.engine_files)
        parameters.update(options.parameters or {})
        what, module, cls = "the engine", "engine_model", "EngineModel"
    else:
        parameters["target_model"] = engine_model
        what, module, cls = f"forwards to the model {engine_model}", "forwarding_model", "ForwardingModel"
    (version / "model.py").write_text(_MODEL_PY.format(what=what, module=module, cls=cls), encoding="utf-8")
    text = model_config(
        folder.name, model, max_batch_size=max_batch_size, decoupled=options.decoupled, parameters=parameters
    )
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")


def _place_engine(engine: Engine, target: Path, how: EngineFiles) -> str:
    """Returns the value of the parameter `engine`."""
    source = engine.path.resolve()
    if how == "path":
        return str(source)
    if how == "symlink":
        target.symlink_to(source, target_is_directory=True)
        return ENGINE_FOLDER
    shutil.copytree(source, target)
    open_engine(target, verify=True)
    return ENGINE_FOLDER


@contextmanager
def _staged_models(output: Path, names: Sequence[str], force: bool) -> Iterator[Path]:
    """A scratch folder beside `output`, whose models go there when the block ends well."""
    _check_free(output, names, force)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Not inside of `output`, which a running Triton may be looking at.
        stage = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    except OSError as error:
        raise AotllmError(f"{output}: cannot be created: {error.strerror}") from None
    try:
        yield stage
        _move_models(stage, output, names)
    except OSError as error:
        raise AotllmError(f"{output}: cannot be written: {error.strerror}; nothing was changed") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _move_models(stage: Path, output: Path, names: Sequence[str]) -> None:
    stage.chmod(0o755)
    if not output.exists():
        os.rename(stage, output)
        return
    old = stage / ".old"
    old.mkdir()
    moved: list[str] = []
    try:
        for name in names:
            if (output / name).exists():
                os.rename(output / name, old / name)
            moved.append(name)
            os.rename(stage / name, output / name)
    except OSError:
        for name in moved:
            if (output / name).exists():
                os.rename(output / name, stage / name)
            if (old / name).exists():
                os.rename(old / name, output / name)
        raise


def _check_free(output: Path, names: Sequence[str], force: bool) -> None:
    if output.exists() and not output.is_dir():
        raise AotllmError(f"{output}: is a file; a model repository is a folder")
    for folder in (output / name for name in names):
        if not folder.exists():
            continue
        if not force:
            raise AotllmError(
                f"{folder}: exists already; choose another folder or --name, or replace what was exported with --force"
            )
        config = folder / "config.pbtxt"
        if not config.is_file() or f'"{_MARK}"' not in config.read_text(encoding="utf-8", errors="replace"):
            raise AotllmError(f"{folder}: is not a model that aotllm exported, so it is not replaced; move it away")
