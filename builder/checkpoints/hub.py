"""`hf:org/name`: a checkpoint of the Hugging Face hub, through `huggingface_hub` and its cache."""

from __future__ import annotations

from pathlib import Path

from aotllm.errors import CheckpointError

PREFIX = "hf:"
_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")


def fetch_from_hub(model: str) -> Path:
    """The local folder of `hf:org/name` or `hf:org/name@revision`, downloaded where the hub's cache lacks it.

    Tokens, mirrors, cache folder and offline mode are `huggingface_hub`'s own settings (`HF_TOKEN`, `HF_ENDPOINT`,
    `HF_HOME`, `HF_HUB_OFFLINE`).

    Raises:
        CheckpointError: the name is malformed, there is no such repository, or it can neither be reached nor is cached.
    """
    from huggingface_hub import snapshot_download

    name, _, revision = model.removeprefix(PREFIX).partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(_FILES)))
    except Exception as error:  # its errors have many roots: OSError, ValueError, httpx's
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{model}: cannot be fetched from the hub: {reason}; expected hf:org/name or hf:org/name@revision"
        ) from error
