"""`open_checkpoint`: the format follows from the content, and a refusal says what was found and what is accepted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.checkpoints.gguf import GgufCheckpoint
from aotllm.builder.checkpoints.huggingface import HuggingFaceCheckpoint
from aotllm.errors import CheckpointError
from tests.builder.checkpoints.raw_gguf import tiny_llama
from tests.builder.checkpoints.tiny_models import make_model


@pytest.mark.parametrize("name", ["model.gguf", "model", "model.bin", "MODEL.GGUF"])
def test_gguf_by_content(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(tiny_llama().pack())
    assert isinstance(open_checkpoint(str(tmp_path / name)), GgufCheckpoint)


def test_folders(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    assert isinstance(open_checkpoint(str(tmp_path)), HuggingFaceCheckpoint)


def write(folder: Path, name: str, content: bytes = b"") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def make_pipe(folder: Path, name: str) -> Path:
    os.mkfifo(folder / name)
    return folder / name


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda f: f / "missing", "missing: does not exist"),
    "impossible name": (lambda f: Path("a\0b"), "cannot be opened"),
    "long name": (lambda f: f / ("x" * 5000), "cannot be opened"),
    "empty folder": (lambda f: f, "a folder without config.json"),
    "folder of a GGUF file": (lambda f: write(f, "m.gguf").parent, "it holds m.gguf; give that file"),
    "a pipe": (lambda f: make_pipe(f, "model.gguf"), "model.gguf: cannot be opened .not a regular file"),
    "a device": (lambda f: Path("/dev/zero"), "/dev/zero: cannot be opened .not a regular file"),
    "text": (lambda f: write(f, "notes.txt", b"hello"), "a file that does not start with b'GGUF'"),
    "weights": (lambda f: write(f, "model.safetensors", b"x"), "does not start with b'GGUF'.*; give its folder, /"),
    "config": (lambda f: write(f, "config.json", b"{}"), "; give its folder, /"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(make(tmp_path))
    accepted = r"expected a Hugging Face folder (config.json and model.safetensors) or a GGUF file"
    assert accepted in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "cannot be read"), (b"hello", r"not a GGUF file: it starts with b'hell'"), (b"GG", "truncated")],
)
def test_gguf_files_that_are_none(content: bytes, message: str, tmp_path: Path) -> None:
    """The name says GGUF, so the error says what is wrong with it as a GGUF file."""
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path, "model.gguf", content))


def test_errors_do_not_keep_files_open(tmp_path: Path) -> None:
    before = open_descriptors()
    for _ in range(20):
        with pytest.raises(CheckpointError):
            open_checkpoint(write(tmp_path, "model.gguf", tiny_llama().pack()[:-1]))
    assert open_descriptors() <= before


def open_descriptors() -> int:
    folder: Any = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0
