"""`engine.json`: what an engine is, needs and allows. One schema, checked before any other byte is interpreted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from aotllm.engines.record import Record, RecordError
from aotllm.errors import EngineError, EngineIncompatible

SCHEMA_VERSION = 1
"""Of manifest, plan and packed layouts together: a change to any of them that old readers would misread raises it"""

MANIFEST_FILE = "engine.json"


@dataclass(frozen=True)
class Model(Record):
    """Which model an engine holds."""

    POSITIVE: ClassVar = frozenset({"num_parameters"})

    name: str
    """The name that the checkpoint gives itself; never a path"""
    architecture: str
    identity: str
    """SHA-256 over the configuration and the digest of every source tensor"""
    num_parameters: int


@dataclass(frozen=True)
class Target(Record):
    """Where an engine runs."""

    name: str
    """cpu | cuda | tensorrt | tensorrt-rtx"""
    requires: tuple[str, ...]
    """Features that the machine must have, e.g. avx2 or sm_90a"""


@dataclass(frozen=True)
class Quantization(Record):
    """How the build quantized weights (`aotllm build --quantize`)."""

    method: str
    """fp8 | int8 | int4"""
    group: int | None
    """Inputs that share a scale; None = all of a row"""
    symmetric: bool
    """Whether weights are a scale times a code, without a zero point or a least value"""


@dataclass(frozen=True)
class Precision(Record):
    """How numbers are stored."""

    OMITTED: ClassVar = frozenset({"quantization"})
    """Engines of versions that did not know the field keep their digest"""

    dtype: str
    """Of the build: auto | f32 | f16 | bf16"""
    kv_cache_dtype: str
    """cpu: f32 | bf16 | int16 | int8; cuda: bf16 | fp8"""
    weight_formats: dict[str, int]
    """Packed format → bytes, those of all ranks together"""
    quantization: Quantization | None = None
    """None = weights have the checkpoint's values; the field is then not stored"""


@dataclass(frozen=True)
class Parallel(Record):
    """How an engine is split over ranks."""

    POSITIVE: ClassVar = frozenset({"tp", "pp"})

    tp: int = 1
    pp: int = 1


@dataclass(frozen=True)
class Limits(Record):
    """The shape envelope that buffers were planned for."""

    POSITIVE: ClassVar = frozenset({"max_seq_len", "max_num_tokens", "max_batch_size", "tokens_per_block"})

    max_seq_len: int
    """Prompt plus generated tokens of one sequence"""
    max_num_tokens: int
    """Tokens of one step over all sequences; no cap on prompts, which run in chunks"""
    max_batch_size: int
    """Sequences of one step"""
    tokens_per_block: int


@dataclass(frozen=True)
class Memory(Record):
    """What one rank of a loaded engine takes, in bytes: the one that takes most."""

    weights: int
    arena: int
    kv_per_token: int


@dataclass(frozen=True)
class FileEntry(Record):
    """A file of the bundle, to be checked before it is read."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest(Record):
    """The whole of `engine.json`."""

    builder_version: str
    model: Model
    target: Target
    precision: Precision
    parallel: Parallel
    limits: Limits
    memory: Memory
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    build_flags: tuple[str, ...]
    """Flags of `aotllm build` that make this engine again, without the model's path"""
    files: dict[str, FileEntry]
    schema_version: int = SCHEMA_VERSION

    def digest(self) -> str:
        """SHA-256 over the canonical JSON of all fields; stored beside them so that a damaged manifest is seen."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Writes `engine.json` into `folder`."""
        record = {"schema_version": self.schema_version, **self.model_dump(mode="json")}
        record["manifest_sha256"] = self.digest()
        (folder / MANIFEST_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def rebuild_command(build_flags: Any) -> str:
    """The command that makes an engine again; `build_flags` as a manifest (of any version) holds them."""
    flags = [flag for flag in build_flags if isinstance(flag, str)] if isinstance(build_flags, list | tuple) else []
    return " ".join(["aotllm build MODEL -o ENGINE", *flags])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the engine in `folder`.

    Raises:
        EngineError: no such folder, no manifest, or one that is damaged.
        EngineIncompatible: written in another schema version.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise EngineError(f"{folder}: {what}; an engine is a folder that 'aotllm build MODEL -o FOLDER' writes")
    path = folder / MANIFEST_FILE
    record = _read_json(path)
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise EngineIncompatible(
            f"{path}: the engine has schema version {version!r}, this aotllm reads version {SCHEMA_VERSION}; "
            f"build it again with '{rebuild_command(record.get('build_flags'))}'"
        )
    stored_digest = record.pop("manifest_sha256", None)
    try:
        manifest = Manifest.model_validate(record)
    except RecordError as error:
        raise EngineError(f"{path}: {error}; the manifest is damaged, build the engine again") from None
    if manifest.digest() != stored_digest:
        raise EngineError(f"{path}: the manifest does not match its own digest: it was changed or damaged; build again")
    return manifest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EngineError(
            f"{path.parent}: holds no {MANIFEST_FILE}; an engine is a folder that 'aotllm build MODEL -o FOLDER' writes"
        ) from None
    except OSError as error:
        raise EngineError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"{path}: not valid JSON ({error}); the manifest is damaged, build the engine again"
        ) from None
    if not isinstance(record, dict):
        raise EngineError(f"{path}: holds a JSON {type(record).__name__}, expected an object")
    return record
