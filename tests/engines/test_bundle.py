"""Opening engines: everything that can be wrong with a folder has a typed error that names file and reason."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from aotllm.engines import open_engine
from aotllm.engines.bundle import staged_folder
from aotllm.errors import EngineError, EngineIncompatible
from tests.engines.samples import write_engine


def test_a_sound_engine_opens(tmp_path: Path) -> None:
    manifest = write_engine(tmp_path / "e")
    engine = open_engine(tmp_path / "e")
    assert engine.manifest == manifest
    assert engine.plan() == {"version": 1}
    assert engine.tensors() == {"w": ("U8", (128,), 128)}
    assert engine.generation_config == {"temperature": 0.7}


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """A property over all positions of the small files, and over a stride of the large one."""
    write_engine(tmp_path)
    for file in sorted(tmp_path.iterdir()):
        data = file.read_bytes()
        for i in range(0, len(data), 1 if len(data) < 200 else 7):
            file.write_bytes(data[:i] + bytes([data[i] ^ 0x11]) + data[i + 1 :])
            with pytest.raises((EngineError, EngineIncompatible)) as error:
                open_engine(tmp_path)
            assert str(tmp_path) in str(error.value)
        file.write_bytes(data)
    open_engine(tmp_path)


def test_every_truncation_is_found_even_unverified(tmp_path: Path) -> None:
    write_engine(tmp_path)
    for file in sorted(tmp_path.iterdir()):
        data = file.read_bytes()
        for size in (0, 1, len(data) // 2, len(data) - 2):
            file.write_bytes(data[:size])
            with pytest.raises(EngineError, match=file.name):
                open_engine(tmp_path, verify=False)
        file.write_bytes(data)


def test_missing_pieces(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not exist"):
        open_engine(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="is a file"):
        open_engine(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match=r"holds no engine\.json"):
        open_engine(tmp_path / "empty")
    write_engine(tmp_path / "e")
    (tmp_path / "e" / "rank0.engine").unlink()
    with pytest.raises(EngineError, match=r"rank0\.engine: is missing"):
        open_engine(tmp_path / "e")


def test_another_schema_version_names_the_rebuild_command(tmp_path: Path) -> None:
    write_engine(tmp_path, build_flags=("--max-seq-len 64",))
    record = json.loads((tmp_path / "engine.json").read_text())
    record["schema_version"] = 999
    record["a_field_of_the_future"] = True
    (tmp_path / "engine.json").write_text(json.dumps(record))
    with pytest.raises(
        EngineIncompatible, match=r"999.*reads version 1.*aotllm build MODEL -o ENGINE --max-seq-len 64"
    ):
        open_engine(tmp_path)


def test_another_target_is_refused(tmp_path: Path) -> None:
    write_engine(tmp_path, target="tensorrt")
    with pytest.raises(EngineIncompatible, match="'tensorrt'.*runs cpu, cuda"):
        open_engine(tmp_path)


def test_staging_is_all_or_nothing(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "engine"
    with pytest.raises(RuntimeError), staged_folder(output) as stage:
        (stage / "half").touch()
        raise RuntimeError
    assert list(output.parent.iterdir()) == []

    with staged_folder(output) as stage:
        (stage / "engine.json").touch()
    assert [f.name for f in output.parent.iterdir()] == ["engine"]

    with pytest.raises(EngineError, match="exists already"), staged_folder(output):
        pass
    with staged_folder(output, replace=True) as stage:
        (stage / "engine.json").write_text("new")
    assert (output / "engine.json").read_text() == "new"
    assert [f.name for f in output.parent.iterdir()] == ["engine"]


def test_only_engines_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(EngineError, match="it is not an engine"), staged_folder(tmp_path / "photos", replace=True):
        pass
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The file-size limit of a process stands in for the full disk: the write itself fails, in the kernel."""
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from aotllm.engines.bundle import staged_folder\n"
        "from aotllm.errors import EngineError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "  with staged_folder(Path(sys.argv[1])) as stage: (stage / 'rank0.engine').write_bytes(bytes(10_000))\n"
        "except EngineError as error: print(error)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)  # available here
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "e")], capture_output=True, text=True, check=True
    )
    assert "cannot be written: File too large; nothing was left behind" in done.stdout
    assert list(tmp_path.iterdir()) == []
