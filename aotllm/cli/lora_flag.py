"""`--lora NAME=FOLDER`, of `aotllm run` and `aotllm serve`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from aotllm.cli.options import Option
from aotllm.errors import InvalidRequest

LORA_OPTION = Option(("--lora",), "LoRA adapter (PEFT folder) and its name; may be repeated.", metavar="NAME=FOLDER")


def parse_loras(given: Sequence[str], taken: Iterable[str] = ()) -> dict[str, Path]:
    """Name → folder. Raises InvalidRequest for what has no such form, and for names that are given twice or `taken`."""
    loras: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise InvalidRequest(f"--lora must be NAME=FOLDER, got {text!r:.80}", "lora")
        if name in loras or name in taken:
            raise InvalidRequest(f"--lora {name}: the name is taken; each adapter and model needs its own", "lora")
        loras[name] = Path(folder)
    return loras
