"""LoRA adapters by name: ids, names that are taken or unknown, unloading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aotllm import BeamSearchParams, Executor, Request, SamplingParams
from aotllm.adapters import AdapterTable
from aotllm.errors import CheckpointError, InvalidRequest
from aotllm.manager import ManagerRequest
from tests.aotllm.fake_manager import FakeManager, says

Start = Callable[..., Executor]


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are read as their own names; the one named "bad" is damaged."""

    def read(folder: Path) -> str:
        if folder.name == "bad":
            raise CheckpointError("bad: adapter_model.safetensors is truncated")
        return folder.name

    monkeypatch.setattr("aotllm.adapters.read_adapter", read)


def test_requests_find_an_adapter_by_its_name(start: Start):
    manager = FakeManager(says("ok"))
    executor = start(manager)
    executor.load_lora("poet", "a/poet")
    executor.load_lora("cook", Path("a/cook"))
    executor.generate([Request(prompt="?", adapter="cook"), Request(prompt="?", adapter="poet"), "?"])
    assert [request.adapter for request in manager.submitted] == [2, 1, 0]
    assert (executor.lora_names, manager.adapters) == (("poet", "cook"), {1: "poet", 2: "cook"})


def test_an_unloaded_adapter_is_unknown_and_its_id_is_never_used_again(start: Start):
    manager = FakeManager(says("ok"))
    executor = start(manager)
    executor.load_lora("poet", "old")
    executor.unload_lora("poet")
    assert (executor.lora_names, manager.adapters) == ((), {})
    with pytest.raises(InvalidRequest, match="no adapter 'poet'; loaded: none") as caught:
        executor.submit(Request(prompt="?", adapter="poet"))
    assert caught.value.param == "adapter"
    executor.load_lora("poet", "new")
    assert manager.adapters == {2: "new"}


def test_an_adapter_stays_until_the_last_of_those_who_hold_it_is_done():
    manager = FakeManager()
    table = AdapterTable(manager)
    table.load("poet", Path("a"))
    adapter_id = table.id_of("poet")
    with table.held(adapter_id):
        with table.held(adapter_id):
            table.unload("poet")
            assert (table.names, manager.adapters) == ((), {1: "a"})
        assert manager.adapters == {1: "a"}
    assert manager.adapters == {}
    table.load("poet", Path("b"))
    with table.held(table.id_of("poet")):
        pass
    assert manager.adapters == {2: "b"}


def test_a_beam_search_keeps_its_adapter(start: Start):
    manager = FakeManager(says("ok"))
    executor = start(manager)
    executor.load_lora("poet", "a")
    seen: list[int] = []
    submit = manager.submit

    def unload_meanwhile(request: ManagerRequest) -> int:
        if executor.lora_names:
            executor.unload_lora("poet")
        seen.append(len(manager.adapters))
        return submit(request)

    manager.submit = unload_meanwhile  # type: ignore[method-assign]
    request = Request(prompt="?", adapter="poet", sampling=SamplingParams(max_tokens=3))
    executor.beam_search(request, BeamSearchParams(1))
    assert seen
    assert set(seen) == {1}
    assert manager.adapters == {}


@pytest.mark.parametrize(("name", "folder"), [("", "x"), ("poet", "x"), ("other", "bad")])
def test_what_cannot_be_loaded_changes_nothing(start: Start, name: str, folder: str):
    manager = FakeManager(says("ok"))
    executor = start(manager)
    executor.load_lora("poet", "a")
    with pytest.raises((InvalidRequest, CheckpointError)):
        executor.load_lora(name, folder)
    assert (executor.lora_names, manager.adapters) == (("poet",), {1: "a"})


def test_an_adapter_that_the_runtime_refuses_has_no_name(start: Start, monkeypatch: pytest.MonkeyPatch):
    manager = FakeManager(says("ok"))

    def refuse(adapter_id: int, adapter: object) -> None:
        raise InvalidRequest("layers.0.q_proj: rank 8 for 16 inputs")

    monkeypatch.setattr(manager, "load_adapter", refuse)
    executor = start(manager)
    with pytest.raises(InvalidRequest, match="rank 8"):
        executor.load_lora("poet", "a")
    assert executor.lora_names == ()


def test_unloading_what_is_not_there(start: Start):
    with pytest.raises(InvalidRequest, match="no adapter 'poet'"):
        start(FakeManager(says("ok"))).unload_lora("poet")
