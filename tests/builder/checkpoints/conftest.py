"""Folders of tiny models, saved once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builder.checkpoints.tiny_models import make_model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a model of `MODELS`, saved once."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
            make_model(name).save_pretrained(folders[name])
        return folders[name]

    return save


@pytest.fixture
def folder(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A private copy of the llama folder, to be changed."""
    return Path(shutil.copytree(saved("llama"), tmp_path / "llama"))
