"""Atheris harness of the GGUF reader: any file gives a model, CheckpointError or UnsupportedModel.

    python tests/fuzz/fuzz_gguf.py -max_total_time=60 [corpus_dir]

Options are libFuzzer's. Seeds are made on the spot; inputs that reach new code are added to `corpus_dir` where one is
given. A failure is written to `crash-…` in the working folder: pass that file instead of a folder to run it again.
Not collected by pytest (the name does not start with `test_`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness import fuzz, read_everything

from tests.builder.checkpoints import raw_gguf as raw


def seeds() -> Iterator[bytes]:
    """A whole model, with every kind of value, of other architectures, and a header alone."""
    yield raw.tiny_llama().pack()
    every_kind = raw.tiny_llama()
    every_kind.keys += [
        ("u8", raw.U8, 1),
        ("i64", raw.I64, -1),
        ("f64", raw.F64, 1.5),
        ("flags", raw.ARRAY, (raw.BOOL, [0, 1])),
        ("nested", raw.ARRAY, (raw.ARRAY, [(raw.U16, [1, 2]), (raw.STRING, ["x"])])),
        ("general.alignment", raw.U32, 32),
        ("llama.rope.scaling.type", raw.STRING, "yarn"),
        ("llama.rope.scaling.factor", raw.F32, 4.0),
        ("tokenizer.ggml.eos_token_id", raw.U32, 1),
    ]
    every_kind.tensors.append(raw.RawTensor("rope_freqs.weight", (2,), raw.F32_TYPE, b"\0\0\x80?" * 2))
    yield every_kind.pack()
    yield raw.tiny_experts().pack()
    for architecture in ("qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3"):
        other = raw.tiny_llama()
        other.keys = [
            (str(key).replace("llama", architecture), kind, architecture if content == "llama" else content)
            for key, kind, content in other.keys
        ]
        yield other.pack()
    yield raw.RawGguf([("general.architecture", raw.STRING, "llama")], version=2).pack()


def test_one(folder: Path, data: bytes) -> None:
    """Reads the input as one GGUF file."""
    path = folder / "input.gguf"
    path.write_bytes(data)
    read_everything(path)


if __name__ == "__main__":
    fuzz(seeds(), test_one)
