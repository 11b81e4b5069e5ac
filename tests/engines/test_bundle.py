"""Opening engines: everything that can be wrong with a folder has a typed error that names file and reason."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aotllm.engines import open_engine, verification
from aotllm.engines.bundle import file_sha256, staged_folder
from aotllm.engines.manifest import FileEntry, Quantization, read_manifest
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


def test_how_weights_were_quantized_is_part_of_the_manifest_only_where_they_were(tmp_path: Path) -> None:
    """So engines of versions that did not know the field have the digest that they had."""
    plain = write_engine(tmp_path)
    assert "quantization" not in json.loads((tmp_path / "engine.json").read_text())["precision"]
    assert read_manifest(tmp_path) == plain
    quantization = Quantization(method="int4", group=64, symmetric=False)
    precision = plain.precision.model_copy(update={"quantization": quantization})
    plain.model_copy(update={"precision": precision}).write(tmp_path)
    record = json.loads((tmp_path / "engine.json").read_text())["precision"]
    assert record["quantization"] == {"method": "int4", "group": 64, "symmetric": False}
    assert read_manifest(tmp_path).precision.quantization == quantization


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


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("cache")
class TestVerificationBeside:
    def test_a_sound_engine(self, tmp_path):
        write_engine(tmp_path / "e")
        engine = open_engine(tmp_path / "e", verify="beside")
        assert engine.verification is not None
        engine.verification.finish()
        assert engine == open_engine(tmp_path / "e")

    def test_damage_is_told_when_it_is_waited_for(self, tmp_path):
        write_engine(tmp_path / "e")
        path = tmp_path / "e" / "rank0.engine"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        engine = open_engine(tmp_path / "e", verify="beside")
        assert engine.verification is not None
        for _ in range(2):
            with pytest.raises(EngineError, match=r"rank0\.engine: SHA-256"):
                engine.verification.finish()

    def test_sizes_are_compared_at_once(self, tmp_path):
        write_engine(tmp_path / "e")
        (tmp_path / "e" / "tokenizer.json").write_text("{ }")
        with pytest.raises(EngineError, match=r"tokenizer\.json: has 3 bytes"):
            open_engine(tmp_path / "e", verify="beside")


@pytest.mark.parametrize("size", [0, 1, 4096, 1_000_003])
def test_digests_of_files(tmp_path, size):
    data = bytes(i * 7 % 251 for i in range(size))
    (tmp_path / "f").write_bytes(data)
    assert file_sha256(tmp_path / "f") == hashlib.sha256(data).hexdigest()


class TestVerifiedFiles:
    """An engine is hashed when it is first seen, and again when one of its files is another one."""

    @pytest.fixture
    def folder(self, tmp_path, cache, monkeypatch) -> Path:
        write_engine(tmp_path / "e")
        self.let_time_pass(monkeypatch, 60)
        return tmp_path / "e"

    @staticmethod
    def let_time_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        now = verification.time.time()
        monkeypatch.setattr(verification.time, "time", lambda: now + seconds)

    @staticmethod
    def load(folder: Path) -> bool:
        """Whether its digests were compared."""
        engine = open_engine(folder, verify="beside")
        if engine.verification is not None:
            engine.verification.finish()
        return engine.verification is not None

    def test_once(self, folder):
        assert [self.load(folder) for _ in range(3)] == [True, False, False]

    @pytest.mark.parametrize("name", ["rank0.engine", "tokenizer.json", "generation_config.json"])
    def test_a_file_that_was_written_to(self, folder, monkeypatch, name):
        self.load(folder)
        path, status = folder / name, (folder / name).stat()
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a tool that hides it
        with pytest.raises(EngineError, match="SHA-256"):
            self.load(folder)
        path.write_bytes(data)
        self.let_time_pass(monkeypatch, 120)
        assert [self.load(folder) for _ in range(2)] == [True, False]

    def test_a_copy(self, folder):
        self.load(folder)
        shutil.copytree(folder, folder.parent / "copy")
        assert self.load(folder.parent / "copy")

    def test_another_manifest_over_the_same_files(self, folder):
        self.load(folder)
        manifest = read_manifest(folder)
        entry = manifest.files["rank0.engine"]
        wrong = manifest.model_copy({"files": {**manifest.files, "rank0.engine": FileEntry(entry.bytes, "0" * 64)}})
        wrong.write(folder)
        with pytest.raises(EngineError, match="SHA-256"):
            self.load(folder)

    def test_files_that_have_just_been_written_are_not_trusted_yet(self, tmp_path, cache):
        write_engine(tmp_path / "e")
        assert [self.load(tmp_path / "e") for _ in range(2)] == [True, True]

    def test_damage_is_not_remembered(self, folder):
        (folder / "tokenizer.json").write_text("[]")
        for _ in range(2):
            with pytest.raises(EngineError, match=r"tokenizer\.json: SHA-256"):
                self.load(folder)

    def test_without_a_folder_to_write_to(self, folder, cache):
        cache.write_text("a file")
        assert [self.load(folder) for _ in range(2)] == [True, True]

    def test_verify_always_reads(self, folder):
        self.load(folder)
        called = []
        engine = open_engine(folder, verify=False)
        assert engine.verification is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("aotllm.engines.bundle.file_sha256", lambda path: called.append(path) or file_sha256(path))
            open_engine(folder, verify=True)
        assert len(called) == len(engine.manifest.files)
