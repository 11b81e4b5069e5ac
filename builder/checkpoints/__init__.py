"""Readers of model files: Hugging Face folders and GGUF files behind one `Checkpoint`."""

from __future__ import annotations

from pathlib import Path

from aotllm.builder.checkpoints.base import FLOAT_STORAGE, Checkpoint, TensorInfo, TokenizerAssets
from aotllm.builder.checkpoints.hub import PREFIX, fetch_from_hub
from aotllm.errors import CheckpointError

__all__ = ["FLOAT_STORAGE", "Checkpoint", "TensorInfo", "TokenizerAssets", "open_checkpoint"]

_ACCEPTED = "a Hugging Face folder (config.json and model.safetensors) or a GGUF file"
_GGUF_MAGIC = b"GGUF"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a model, telling its format from what is there.

    A folder with `config.json` is a Hugging Face checkpoint; a file that starts with GGUF's magic number, or is named
    `.gguf`, is GGUF (any part of a split model stands for the whole). `hf:org/name` is fetched from the hub.

    Raises:
        CheckpointError: there is nothing of the kind at `path`, or it is damaged.
        UnsupportedModel: the architecture, or a feature of it, is not implemented.
    """
    if str(path).startswith(PREFIX):
        path = fetch_from_hub(str(path))
    path = Path(path)
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise OSError("not a regular file")
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: does not exist; expected {_ACCEPTED}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise CheckpointError(f"{path}: cannot be opened ({error}); expected {_ACCEPTED}") from error
    if magic != _GGUF_MAGIC and path.suffix.lower() != ".gguf":
        hint = (
            f"; give its folder, {path.parent}" if path.suffix == ".safetensors" or path.name == "config.json" else ""
        )
        raise CheckpointError(f"{path}: a file that does not start with {_GGUF_MAGIC!r}; expected {_ACCEPTED}{hint}")
    from aotllm.builder.checkpoints.gguf import GgufCheckpoint

    return GgufCheckpoint(path)


def _open_folder(path: Path) -> Checkpoint:
    if (path / "config.json").is_file():
        from aotllm.builder.checkpoints.huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    ggufs = sorted(entry.name for entry in path.glob("*.gguf"))
    found = f"it holds {ggufs[0]}; give that file" if ggufs else "a folder without config.json"
    raise CheckpointError(f"{path}: {found}; expected {_ACCEPTED}")
