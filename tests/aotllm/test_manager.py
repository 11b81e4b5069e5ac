"""`RuntimeManager`: every value arrives in the field of the compiled runtime that its type stub declares."""

from __future__ import annotations

import ast
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import aotllm
from aotllm import ExecutorConfig, SamplingParams
from aotllm.cuda_libraries import find_cublaslt
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
        tactics_note = ""

        def __init__(self, rank_file: str, config: Any) -> None:
            calls.rank_file, calls.config = rank_file, config

        def submit(self, request: Any) -> int:
            calls.request = request
            return 7

        cancel = poll = stats = memory = kv_events = load_adapter = unload_adapter = shutdown = None

    names = ("ManagerConfig", "Request", "SamplingParams")
    runtime = SimpleNamespace(GptManager=GptManager, **{name: stub_class(name) for name in names})
    monkeypatch.setitem(sys.modules, "aotllm._runtime", runtime)
    monkeypatch.setattr(aotllm, "_runtime", runtime, raising=False)
    return calls


def test_sizes(calls: SimpleNamespace):
    same = {
        "num_threads": 1,
        "device": 2,
        "deterministic": True,
        "num_kv_blocks": 2,
        "max_queue_size": 3,
        "max_batch_size": 4,
        "max_num_tokens": 5,
        "max_chunk_tokens": 6,
        "max_queued_tokens": 7,
        "capacity_policy": "guaranteed_no_evict",
        "queue_policy": "longest_prefix",
        "max_wait_steps": 8,
        "max_kv_events": 9,
        "stuck_step_seconds": 2.5,
        "num_speculative_tokens": 10,
        "ngram_max": 5,
        "ngram_min": 2,
    }
    config = ExecutorConfig(
        **same, devices="2,3", kv_host_memory="1MiB", prefix_caching=False, speculative="draft.engine"
    )
    manager = RuntimeManager(Path("rank0.engine"), config, (2, 3), Path("draft0.engine"))
    assert calls.rank_file == "rank0.engine"
    assert values(calls.config) == {
        **same,
        "devices": [2, 3],
        "cublaslt": find_cublaslt(),
        "tactics": "",
        "eos_token_ids": [2, 3],
        "kv_cache_bytes": 0,
        "kv_cache_tokens": 0,
        "kv_cache_fraction": 0.0,
        "kv_host_bytes": 1 << 20,
        "enable_prefix_caching": False,
        "speculative": "draft",
        "draft_rank_file": "draft0.engine",
    }
    assert (manager.max_seq_len, manager.vocab_size) == (64, 100)


def test_which_tactics_are_used_is_logged(
    calls: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        RuntimeManager(tmp_path / "rank0.engine", ExecutorConfig(), ())
        assert not caplog.records, "there are none"
        (tmp_path / "tactics.json").write_text("{...}")
        RuntimeManager(tmp_path / "rank0.engine", ExecutorConfig(), ())
        monkeypatch.setattr(sys.modules["aotllm._runtime"].GptManager, "tactics_note", "tuned on another CPU")
        RuntimeManager(tmp_path / "rank0.engine", ExecutorConfig(), ())
    assert calls.config.tactics == "{...}"
    used, unfit = caplog.records
    assert (used.levelname, used.message) == ("INFO", f"{tmp_path / 'tactics.json'}: its tactics are used")
    assert (unfit.levelname, unfit.message) == ("WARNING", f"{tmp_path / 'tactics.json'}: tuned on another CPU")


@pytest.mark.parametrize(
    ("memory", "native"), [("2GiB", (2 << 30, 0, 0.0)), ("5000tokens", (0, 5000, 0.0)), ("0.25", (0, 0, 0.25))]
)
def test_kv_memory_has_three_units(calls: SimpleNamespace, memory: str, native: tuple[float, ...]):
    RuntimeManager(Path("x"), ExecutorConfig(kv_cache_memory=memory), ())
    config = calls.config
    assert (config.kv_cache_bytes, config.kv_cache_tokens, config.kv_cache_fraction) == native
    assert (config.num_kv_blocks, config.draft_rank_file, config.speculative) == (0, "", "none")


def test_a_request(calls: SimpleNamespace):
    sampling = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.8,
        min_p=0.1,
        typical_p=0.7,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        no_repeat_ngram_size=4,
        logit_bias={7: 1.0, 2: -1.0},
        allowed_token_ids=(2, 7),
        bad_words=("b",),
        min_tokens=1,
        seed=42,
        stop=("a",),
        stop_token_ids=(5, 6),
        ignore_eos=True,
        logprobs=2,
    )
    constraint: Any = object()
    request = ManagerRequest(
        (1, 2),
        sampling,
        n=3,
        logprobs=4,
        prompt_logprobs=5,
        priority=-4,
        return_logits=True,
        timeout=1.5,
        cache_salt="s",
        retention_priority=60,
        adapter=7,
        bad_words_token_ids=((8,), (9, 8)),
        constraint=constraint,
    )
    assert RuntimeManager(Path("x"), ExecutorConfig(), ()).submit(request) == 7
    native = values(calls.request.sampling)
    expected = {name: getattr(sampling, name) for name in native}
    assert native == expected | {
        "logit_bias": {2: -1.0, 7: 1.0},
        "allowed_token_ids": [2, 7],
        "bad_words": [[8], [9, 8]],
        "stop_token_ids": [5, 6],
    }
    assert values(calls.request) | {"sampling": None} == {
        "prompt_token_ids": [1, 2],
        "sampling": None,
        "n": 3,
        "priority": -4,
        "logprobs": 4,
        "prompt_logprobs": 5,
        "return_logits": True,
        "constraint": constraint,
        "timeout": 1.5,
        "cache_salt": "s",
        "retention_priority": 60,
        "adapter": 7,
        "pooling": "none",
    }


@pytest.mark.parametrize(("seed", "native"), [(None, None), (0, 0), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seeds_are_64_bits(calls: SimpleNamespace, seed: int | None, native: int | None):
    request = ManagerRequest((1,), SamplingParams(max_tokens=1, seed=seed))
    RuntimeManager(Path("x"), ExecutorConfig(), ()).submit(request)
    assert calls.request.sampling.seed == native
    assert (calls.request.logprobs, calls.request.prompt_logprobs, calls.request.n) == (-1, -1, 1)
    assert (calls.request.sampling.allowed_token_ids, calls.request.sampling.bad_words) == ([], [])


@pytest.mark.parametrize(
    ("options", "native", "ours"),
    [
        ({"kv_cache_memory": "1"}, "kv_cache_bytes", "kv_cache_memory"),
        ({"kv_cache_memory": "1tokens"}, "kv_cache_tokens", "kv_cache_memory"),
        ({"kv_cache_memory": "1.0"}, "kv_cache_fraction", "kv_cache_memory"),
        ({"kv_cache_memory": "1.0"}, "num_blocks", "kv_cache_memory"),
        ({"num_kv_blocks": 9}, "num_blocks", "num_kv_blocks"),
        ({"kv_host_memory": "1TB"}, "kv_host_bytes", "kv_host_memory"),
        ({"max_batch_size": 9}, "max_batch_size", "max_batch_size"),
    ],
)
def test_a_refused_configuration_names_the_field_that_the_user_set(
    calls: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], native: str, ours: str
):
    def refuse(*_: object) -> None:
        raise InvalidRequest(f"{native} is too much", native)

    monkeypatch.setattr(sys.modules["aotllm._runtime"].GptManager, "__init__", refuse)
    with pytest.raises(InvalidRequest) as caught:
        RuntimeManager(Path("x"), ExecutorConfig(**options), ())
    assert caught.value.param == ours
    assert ours in caught.value.message


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_to_embed(calls: SimpleNamespace, pooling: Any):
    request = ManagerRequest((1, 2), SamplingParams(max_tokens=1), pooling=pooling)
    RuntimeManager(Path("x"), ExecutorConfig(), ()).submit(request)
    assert calls.request.pooling == pooling
