"""`aotllm verify`: compare an engine's files with the digests in its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aotllm.cli.console import print_json, size


def verify(
    engine: Annotated[Path, typer.Argument(help="Folder of the engine.", metavar="ENGINE_DIR")],
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Check that every file of an engine is what was built."""
    from aotllm.engines import open_engine

    files = open_engine(engine, verify=True, to_run=False).manifest.files
    total = sum(entry.bytes for entry in files.values())
    if json:
        print_json({"engine": str(engine), "ok": True, "files": len(files), "bytes": total})
    else:
        print(f"{engine}: {len(files)} files, {size(total)}, all as built")
