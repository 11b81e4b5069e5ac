"""A small but complete engine folder for tests of the bundle; its plan is not runnable."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from aotllm.engines.bundle import file_sha256
from aotllm.engines.manifest import FileEntry, Limits, Manifest, Memory, Model, Parallel, Precision, Target
from aotllm.engines.rank_file import RankFileWriter, TensorSpec


def write_engine(folder: Path, target: str = "cpu", build_flags: tuple[str, ...] = ()) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    with RankFileWriter(folder / "rank0.engine", {"w": TensorSpec("U8", (128,))}, {"plan": '{"version": 1}'}) as writer:
        writer.write("w", np.arange(128, dtype=np.uint8))
        writer.close()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    manifest = Manifest(
        builder_version="0.0.0",
        model=Model(name="sample", architecture="llama", identity="0" * 64, num_parameters=128),
        target=Target(name=target, requires=("avx2",)),
        precision=Precision(dtype="auto", kv_cache_dtype="int16", weight_formats={"q4_1": 128}),
        parallel=Parallel(),
        limits=Limits(max_seq_len=64, max_num_tokens=32, max_batch_size=4, tokens_per_block=16),
        memory=Memory(weights=128, arena=1024, kv_per_token=512),
        bos_token_id=1,
        eos_token_ids=(2,),
        bos_token="<s>",
        eos_token="</s>",
        build_flags=build_flags,
        files={f.name: FileEntry(bytes=f.stat().st_size, sha256=file_sha256(f)) for f in sorted(folder.iterdir())},
    )
    manifest.write(folder)
    return manifest
