"""Bad input on the command line: a sentence with file and reason, an exit code, no traceback, nothing left behind."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.engines import build_engine, save_tiny_model
from tests.integration.test_architectures import BASE

BAD_CHECKPOINT, INCOMPATIBLE, USAGE = 3, 4, 2


def aotllm(*arguments: str | Path, preexec: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aotllm", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        preexec_fn=preexec,
    )


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word.lower() in done.stderr.lower().replace("\n", " "), done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path, "LlamaForCausalLM", BASE)
    return path


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Path:
    """A private copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_engine(folder, tmp_path_factory.mktemp("engine") / "tiny.engine").path


def edit_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is None else config.update({key: value})
    (model / "config.json").write_text(json.dumps(config))


def edit_safetensors(model: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    path = model / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"

FOLDER_DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no num_attention_heads": (
        lambda m: edit_config(m, num_attention_heads=None),
        ("config.json", "num_attention_heads"),
    ),
    "ill-typed field": (lambda m: edit_config(m, hidden_size="many"), ("config.json", "hidden_size")),
    "negative layers": (lambda m: edit_config(m, num_hidden_layers=-1), ("num_hidden_layers",)),
    "unknown architecture": (
        lambda m: edit_config(m, model_type="mamba9", architectures=["Mamba9ForCausalLM"]),
        ("mamba9", "llama", "gemma3"),
    ),
    "config is no JSON": (lambda m: (m / "config.json").write_text("{oops") and None, ("config.json", "json")),
    "missing tensor": (
        lambda m: edit_safetensors(m, lambda h: h.update({Q_PROJ + ".lost": h.pop(Q_PROJ)})),
        (Q_PROJ,),
    ),
    "wrong shape": (
        lambda m: edit_safetensors(m, lambda h: h[Q_PROJ].update(shape=[32, 128])),
        (Q_PROJ, "128"),
    ),
    "offset past the end": (
        lambda m: edit_safetensors(m, lambda h: h[Q_PROJ].update(data_offsets=[2**40, 2**40 + 16384])),
        ("model.safetensors", Q_PROJ),
    ),
    "unknown dtype": (lambda m: edit_safetensors(m, lambda h: h[Q_PROJ].update(dtype="F7")), (Q_PROJ, "F7")),
    "truncated weights": (
        lambda m: (m / "model.safetensors").write_bytes((m / "model.safetensors").read_bytes()[:-100]) and None,
        ("model.safetensors",),
    ),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), ("safetensors",)),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), ("tokenizer",)),
}


@pytest.mark.parametrize("damage", FOLDER_DAMAGE)
def test_damaged_folders(damage: str, model: Path, tmp_path: Path) -> None:
    spoil, words = FOLDER_DAMAGE[damage]
    spoil(model)
    assert_refused(aotllm("build", model, "-o", tmp_path / "out"), BAD_CHECKPOINT, *words)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["tiny"]


GGUF_FILES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("bad.gguf",)),
    "bad magic": (b"GGML" + bytes(64), ("bad.gguf", "starts with b'GGML' instead of b'GGUF'")),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ("bad.gguf", "big-endian")),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), ("bad.gguf", "version 1")),
    "truncated": (b"GGUF" + struct.pack("<IQQ", 3, 5, 5) + b"\x04\x00", ("bad.gguf", "truncated")),
    "absurd counts": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), ("bad.gguf",)),
}


@pytest.mark.parametrize("case", GGUF_FILES)
def test_damaged_gguf_files(case: str, tmp_path: Path) -> None:
    data, words = GGUF_FILES[case]
    (tmp_path / "bad.gguf").write_bytes(data)
    assert_refused(aotllm("build", tmp_path / "bad.gguf", "-o", tmp_path / "out"), BAD_CHECKPOINT, *words)
    assert not (tmp_path / "out").exists()


def test_a_truncated_real_gguf(smollm2_gguf: Path, tmp_path: Path) -> None:
    with smollm2_gguf.open("rb") as file:
        (tmp_path / "short.gguf").write_bytes(file.read(5_000_000))
    assert_refused(aotllm("build", tmp_path / "short.gguf", "-o", tmp_path / "out"), BAD_CHECKPOINT, "short.gguf")


def test_paths_that_do_not_exist(tmp_path: Path) -> None:
    assert_refused(aotllm("build", tmp_path / "no", "-o", tmp_path / "out"), BAD_CHECKPOINT, "does not exist")
    assert_refused(aotllm("run", tmp_path / "no", "-p", "x"), BAD_CHECKPOINT, "does not exist")
    assert_refused(aotllm("inspect", tmp_path / "no"), BAD_CHECKPOINT, "does not exist")


def test_damaged_engines(engine: Path, tmp_path: Path) -> None:
    flipped = Path(shutil.copytree(engine, tmp_path / "flipped"))
    data = bytearray((flipped / "rank0.engine").read_bytes())
    data[len(data) // 2] ^= 1
    (flipped / "rank0.engine").write_bytes(data)
    assert_refused(aotllm("run", flipped, "-p", "x"), BAD_CHECKPOINT, "rank0.engine", "damaged")

    other = Path(shutil.copytree(engine, tmp_path / "other"))
    manifest = json.loads((other / "engine.json").read_text())
    (other / "engine.json").write_text(json.dumps({**manifest, "schema_version": 7}))
    assert_refused(aotllm("run", other, "-p", "x"), INCOMPATIBLE, "schema version 7", "aotllm build")


def test_wrong_usage(engine: Path, tmp_path: Path) -> None:
    assert aotllm("frobnicate").returncode == USAGE
    assert_refused(aotllm("run", engine, "-p", "x", "--temperature", "-3"), USAGE, "temperature")
    assert_refused(aotllm("build", tmp_path, "-o", tmp_path / "x", "--max-num-tokens", "0"), USAGE, "max_num_tokens")


def test_a_full_disk_while_building(model: Path, tmp_path: Path) -> None:
    """The kernel refuses the write (file-size limit of the process), as a full disk does."""
    import resource

    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    done = aotllm("build", model, "-o", tmp_path / "out", preexec=limit)
    assert_refused(done, BAD_CHECKPOINT, "cannot be written")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["tiny"]


def test_an_output_that_exists_is_kept(model: Path, engine: Path) -> None:
    before = (engine / "engine.json").read_bytes()
    assert_refused(aotllm("build", model, "-o", engine), BAD_CHECKPOINT, "exists already", "--force")
    assert (engine / "engine.json").read_bytes() == before


def test_forced_isa_that_is_unknown(engine: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aotllm", "run", str(engine), "--raw", "-p", "x"],
        capture_output=True,
        text=True,
        check=False,
        env={"AOTLLM_FORCE_ISA": "z80", "PATH": "/usr/bin:/bin"},
    )
    assert_refused(done, INCOMPATIBLE, "z80", "avx2")
