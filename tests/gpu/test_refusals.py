"""What a CUDA engine is refused with, on a machine that has a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aotllm import Executor, _runtime
from aotllm.engines import Engine
from aotllm.errors import EngineIncompatible, InvalidRequest
from tests.gpu.engines import BASE, tiny_engine
from tests.integration.engines import build_engine, save_tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tmp_path_factory.mktemp("engines"), "llama")[1]


def test_a_device_that_is_not_there(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="device: expected 0 to .*, got 99") as caught:
        Executor(engine, verify=False, device=99)
    assert caught.value.param == "device"


def test_an_engine_for_another_gpu(engine: Engine, tmp_path: Path) -> None:
    """One whose plan says SM75; the sentence names the ones that there are and the flag that helps."""
    other = build_engine(engine.path.parent / "model", tmp_path / "other", target="cuda", sm=80, max_num_tokens=256)
    file = other.rank_file()
    file.write_bytes(file.read_bytes().replace(b'"sm":80', b'"sm":75').replace(b'\\"sm\\":80', b'\\"sm\\":75'))
    with pytest.raises(EngineIncompatible, match=r"SM75.*SM80.*--sm \d\d"):
        _runtime.CudaRunner(str(file), 8)


def test_more_memory_than_there_is(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="kv_cache_memory") as caught:
        Executor(engine, verify=False, kv_cache_memory="900TB")
    assert caught.value.param == "kv_cache_memory"


def test_steps_that_need_more_memory_than_there_is(engine: Engine, tmp_path: Path) -> None:
    huge = {"intermediate_size": 2**17, "num_hidden_layers": 1}
    save_tiny_model(tmp_path / "model", "LlamaForCausalLM", {**BASE, **huge}, dtype="bf16")
    built = build_engine(tmp_path / "model", tmp_path / "engine", target="cuda", max_num_tokens=2**20)
    with pytest.raises(EngineIncompatible, match=r"bytes for its weights and \d+ for steps of 1048576 tokens, the dev"):
        Executor(built, verify=False)


def test_a_refusal_leaves_the_device_usable(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        Executor(engine, verify=False, kv_cache_memory="900TB")
    with Executor(engine, verify=False) as executor:
        assert executor.generate("abc")[0].outputs[0].finish_reason is not None


def test_no_gpu_is_visible(engine: Engine) -> None:
    program = (
        "import sys\nfrom aotllm import Executor\nfrom aotllm.errors import EngineIncompatible\n"
        "try:\n    Executor(sys.argv[1], verify=False)\n"
        "except EngineIncompatible as error:\n    print(error.message)\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program, str(engine.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "needs an NVIDIA GPU" in done.stdout
    assert "--target cpu" in done.stdout or "CUDA_VISIBLE_DEVICES" in done.stdout
