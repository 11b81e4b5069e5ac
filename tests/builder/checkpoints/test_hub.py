"""`hf:org/name` out of the hub's own cache, offline: the real library, no network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.errors import CheckpointError
from tests.builder.checkpoints.tiny_models import make_model

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layout that huggingface_hub documents: models--org--name/{refs,snapshots}."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    make_model("llama").save_pretrained(repository / "snapshots" / REVISION)
    return tmp_path


@pytest.mark.parametrize("name", ["hf:org/tiny", f"hf:org/tiny@{REVISION}", "hf:org/tiny@main"])
def test_a_cached_model_opens(name: str, cache: Path) -> None:
    with open_checkpoint(name) as checkpoint:
        assert checkpoint.config.architecture == "llama"
        assert checkpoint.path.name == REVISION


@pytest.mark.parametrize("name", ["hf:", "hf:no/such", "hf:a/b/c/d", "hf:../../etc", "hf:org/tiny@nowhere"])
def test_what_cannot_be_had_is_named(name: str, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be fetched from the hub") as error:
        open_checkpoint(name)
    assert str(error.value).startswith(f"{name}: ")


def test_a_damaged_snapshot_is_a_checkpoint_error(cache: Path) -> None:
    shutil.rmtree(cache / "models--org--tiny" / "snapshots" / REVISION)
    with pytest.raises(CheckpointError):
        open_checkpoint("hf:org/tiny")
