"""An engine of target cuda where nothing can run it: it builds, and it is refused in one sentence.

Both kinds of installation are met: without CUDA here and in CI, with it on a machine whose GPU is hidden or not there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from aotllm import Executor, _runtime
from aotllm.errors import EngineIncompatible
from tests.integration.engines import build_engine, save_tiny_model

LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.skipif(_runtime.has_cuda(), reason="this build has CUDA")
@pytest.mark.parametrize("quantize", [None, "fp8", "int8", "int4"])
def test_a_build_without_cuda_says_what_to_install(quantize: str | None, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "LlamaForCausalLM", LLAMA, dtype="bf16")
    engine = build_engine(tmp_path / "model", tmp_path / "engine", target="cuda", quantize=quantize)
    engine.verify()
    assert engine.manifest.target.name == "cuda"
    for load in (lambda: Executor(engine), lambda: _runtime.GptManager(str(engine.rank_file()), _config())):
        with pytest.raises(EngineIncompatible, match="for target cuda, .* has no CUDA; install one .*--target cpu"):
            load()


@pytest.mark.skipif(_runtime.has_cuda(), reason="this build has CUDA")
def test_the_largest_sizes_that_build_are_read(tmp_path: Path) -> None:
    """What the builder makes, the runtime takes: it is refused for what is missing here, not for what it says."""
    save_tiny_model(tmp_path / "model", "LlamaForCausalLM", LLAMA, dtype="bf16")
    sizes = {"max_batch_size": 2**20, "max_num_tokens": 2**20, "max_seq_len": 2**24, "tokens_per_block": 128}
    engine = build_engine(tmp_path / "model", tmp_path / "engine", target="cuda", **sizes)
    with pytest.raises(EngineIncompatible, match="has no CUDA"):
        _runtime.GptManager(str(engine.rank_file()), _config())


def _config() -> _runtime.ManagerConfig:
    return _runtime.ManagerConfig()
