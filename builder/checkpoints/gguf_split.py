"""Models that are split over several GGUF files: `name-00001-of-00003.gguf` …"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotllm.builder.checkpoints.fields import Fields
from aotllm.errors import CheckpointError

MAX_PARTS = 10_000

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.ASCII | re.DOTALL)


def find_parts(path: Path) -> list[Path]:
    """All files of the model that `path` is (a part of), first part first; `[path]` for names of unsplit files.

    Raises:
        CheckpointError: a part is missing.
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        raise CheckpointError(f"{path}: part {int(match['number'])} of {count} makes no sense; is the file renamed?")
    parts = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{path}: part of a model in {count} files, of which {missing[0]}{more} is missing")
    return parts


def check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """Checks what a file says of its place against its name.

    Args:
        path: the file.
        metadata: its metadata.
        number: its place, from 0.
        count: how many files the model has.

    Raises:
        CheckpointError: they contradict each other.
    """
    fields = Fields(str(path), metadata)
    stated_count = fields.integer("split.count", 0, minimum=0) or 1
    stated_number = fields.integer("split.no", 0, minimum=0)
    if (stated_number, stated_count) == (number, count):
        return
    hint = "give each its name back, like model-00001-of-00003.gguf"
    raise CheckpointError(
        f"{path}: the file says that it is part {stated_number + 1} of {stated_count}, "
        f"its name that it is part {number + 1} of {count}; {hint}"
    )


def check_tensor_count(path: Path, metadata: Mapping[str, Any], count: int) -> None:
    """Checks the number of tensors in all parts against what the first part says. Raises CheckpointError."""
    stated = Fields(str(path), metadata).integer("split.tensors.count", count, minimum=0)
    if stated != count:
        raise CheckpointError(f"{path}: the parts hold {count} tensors, but the model has {stated}")
