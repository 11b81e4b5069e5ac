"""What the Atheris harnesses share: one scratch file, one way to read it, and the errors that are right."""

from __future__ import annotations

import atexit
import contextlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from package_tree import lay_package_tree  # noqa: E402

# Atheris instruments what the ordinary import system loads, and not what an editable install's finder does.
sys.path.insert(0, str(lay_package_tree()))
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]

_READERS = ["aotllm.builder.checkpoints", "aotllm.builder.config", "aotllm.lora", "aotllm.lora_config"]
with atheris.instrument_imports(include=_READERS):
    from aotllm import lora as lora
    from aotllm.builder.checkpoints import gguf as _gguf  # noqa: F401 - instrumented here, imported lazily elsewhere
    from aotllm.builder.checkpoints import huggingface as _huggingface  # noqa: F401
    from aotllm.builder.checkpoints import open_checkpoint

from aotllm.errors import CheckpointError, UnsupportedModel  # noqa: E402

_MAX_BYTES = 1 << 20


def read_everything(path: Path) -> None:
    """Opens a checkpoint and reads every tensor. Anything but the two errors of bad checkpoints comes out."""
    with contextlib.suppress(CheckpointError, UnsupportedModel), open_checkpoint(path) as checkpoint:
        for name, info in checkpoint.tensors().items():
            assert checkpoint.read(name).shape == info.shape
            assert checkpoint.read_stored(name).nbytes == info.nbytes


def fuzz(seeds: Iterable[bytes], test: Callable[[Path, bytes], None]) -> None:
    """Runs libFuzzer on `test(scratch folder, data)`; its own options and corpus folders come from `sys.argv`.

    The seeds go to a temporary folder, which is given to libFuzzer as one more corpus after those of the caller (new
    inputs are kept in the first).
    """
    warnings.simplefilter("ignore")
    scratch = Path(tempfile.mkdtemp(prefix="aotllm-fuzz-"))
    seed_folder = scratch / "seeds"
    seed_folder.mkdir()
    atexit.register(_remove, scratch)
    for number, seed in enumerate(seeds):
        (seed_folder / f"seed-{number}").write_bytes(seed)

    def one(data: bytes) -> None:
        if len(data) <= _MAX_BYTES:
            test(scratch, data)

    # A single input may take a second at most and hold two gigabytes: what the limits of the readers promise.
    defaults = ["-timeout=10", "-rss_limit_mb=2048", "-max_len=65536"]
    atheris.Setup([sys.argv[0], *defaults, *sys.argv[1:], str(seed_folder)], one)
    atheris.Fuzz()


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
