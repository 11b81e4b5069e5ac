"""GGUF models in several files: any part stands for the whole, and parts that do not fit are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.errors import CheckpointError
from tests.builder.checkpoints import raw_gguf as raw
from tests.builder.checkpoints.raw_gguf import RawGguf, tiny_llama
from tests.builder.checkpoints.tiny_models import make_model, state, write_gguf


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The llama model in parts, as the gguf package splits it."""
    folder = tmp_path_factory.mktemp("split")
    write_gguf(folder / "model.gguf", make_model("llama"), split_max_tensors=12)
    return sorted(folder.iterdir())


def test_split_models(split: list[Path]) -> None:
    assert [path.name for path in split] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in split:
        checkpoint = open_checkpoint(part)
        for name, weight in state(make_model("llama")).items():
            np.testing.assert_array_equal(checkpoint.read(name), weight)


BAD_SPLITS: dict[str, tuple[Callable[[list[Path]], Any], str]] = {
    "part missing": (lambda parts: parts[1].unlink(), "in 3 files, of which model-00002-of-00003.gguf is missing"),
    "two parts missing": (lambda parts: [p.unlink() for p in parts[1:]], "model-00002-of-00003.gguf and 1 more"),
    "parts swapped": (
        lambda parts: (
            (parts[1].rename(parts[1].with_name("x")), parts[2].rename(parts[1]))
            and shutil.copy(parts[1].with_name("x"), parts[2])
        ),
        "says that it is part 3 of 3, its name that it is part 2 of 3",
    ),
    "part damaged": (lambda parts: parts[2].write_bytes(b"GGUF"), "00003-of-00003.gguf: truncated"),
    "part of another model": (
        lambda parts: shutil.copy(parts[0].with_name("other.gguf"), parts[1]),
        "says that it is part 1 of 1, its name that it is part 2 of 3",
    ),
}


@pytest.mark.parametrize("case", BAD_SPLITS)
def test_bad_splits(case: str, split: list[Path], tmp_path: Path) -> None:
    damage, message = BAD_SPLITS[case]
    parts = [Path(shutil.copy(part, tmp_path)) for part in split]
    (tmp_path / "other.gguf").write_bytes(tiny_llama().pack())
    damage(parts)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(parts[0])


def test_parts_that_hold_fewer_tensors_than_the_model_has(tmp_path: Path) -> None:
    """Two parts of the right names and numbers, the second without a tensor that the model had when it was split."""
    file = tiny_llama()
    second = RawGguf([("split.no", raw.U16, 1), ("split.count", raw.U16, 2)], file.tensors[6:])
    file.keys += [("split.no", raw.U16, 0), ("split.count", raw.U16, 2), ("split.tensors.count", raw.I32, 12)]
    file.tensors = file.tensors[:6]
    for number, part in enumerate((file, second), start=1):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(part.pack())
    with pytest.raises(CheckpointError, match="the parts hold 11 tensors, but the model has 12"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    file = tiny_llama()
    second = RawGguf([("split.no", raw.U16, 1), ("split.count", raw.U16, 2)], file.tensors[-1:])
    file.keys += [("split.no", raw.U16, 0), ("split.count", raw.U16, 2)]
    for number, part in enumerate((file, second), start=1):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(part.pack())
    with pytest.raises(CheckpointError, match="00002.gguf: tensor 'output_norm.weight' is in an earlier part"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_a_part_under_another_name(split: list[Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(split[0], tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match="part 1 of 3, its name that it is part 1 of 1; give each its name back"):
        open_checkpoint(path)
