"""`RuntimeManager`: every value arrives in the field of the compiled runtime that its type stub declares."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import aotllm
from aotllm import ExecutorConfig, SamplingParams
from aotllm.errors import InvalidRequest
from aotllm.manager import ManagerRequest, RuntimeManager


def stub_class(name: str) -> type:
    """A class that has the attributes of `name` in `_runtime.pyi` and takes no others."""
    tree = ast.parse((Path(aotllm.__file__).parent / "_runtime.pyi").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name).body
    fields = [
        field.target.id for field in body if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    return type(name, (), {"__slots__": fields})


def values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__slots__}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the runtime was called with."""
    calls = SimpleNamespace()

    class GptManager:
        max_seq_len, vocab_size = 64, 100

        def __init__(self, rank_file: str, config: Any) -> None:
            calls.rank_file, calls.config = rank_file, config

        def submit(self, request: Any) -> int:
            calls.request = request
            return 7

        cancel = poll = stats = shutdown = None

    names = ("ManagerConfig", "Request", "SamplingParams")
    runtime = SimpleNamespace(GptManager=GptManager, **{name: stub_class(name) for name in names})
    monkeypatch.setitem(sys.modules, "aotllm._runtime", runtime)
    monkeypatch.setattr(aotllm, "_runtime", runtime, raising=False)
    return calls


def test_sizes(calls: SimpleNamespace):
    config = ExecutorConfig(1, 2, 3, 4, 5, 6)
    manager = RuntimeManager(Path("rank0.engine"), config, (2, 3))
    assert calls.rank_file == "rank0.engine"
    assert values(calls.config) == {**vars(config), "eos_token_ids": [2, 3]}
    assert (manager.max_seq_len, manager.vocab_size) == (64, 100)


def test_a_request(calls: SimpleNamespace):
    sampling = SamplingParams(9, 0.5, 3, 0.8, 0.1, 42, ("a",), (5, 6), True, 2)
    request = ManagerRequest((1, 2), sampling, priority=-4, return_logits=True)
    assert RuntimeManager(Path("x"), ExecutorConfig(), ()).submit(request) == 7
    native = values(calls.request.sampling)
    assert native == {name: getattr(sampling, name) for name in native} | {"stop_token_ids": [5, 6]}
    assert values(calls.request) | {"sampling": None} == {
        "prompt_token_ids": [1, 2],
        "sampling": None,
        "priority": -4,
        "logprobs": 2,
        "return_logits": True,
    }


@pytest.mark.parametrize(("seed", "native"), [(None, None), (0, 0), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seeds_are_64_bits(calls: SimpleNamespace, seed: int | None, native: int | None):
    request = ManagerRequest((1,), SamplingParams(max_tokens=1, seed=seed))
    RuntimeManager(Path("x"), ExecutorConfig(), ()).submit(request)
    assert calls.request.sampling.seed == native
    assert calls.request.logprobs == -1


@pytest.mark.parametrize("field", ["num_threads", "num_kv_blocks", "max_queue_size", "max_batch_size"])
def test_sizes_out_of_range_are_refused_by_name(field: str):
    with pytest.raises(InvalidRequest) as caught:
        ExecutorConfig(**{field: -1})
    assert caught.value.param == field
