"""`EngineServer`: runs the engines for the front ends, over a Unix socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aotllm.errors import Cancelled, InvalidRequest
from aotllm.loaded_engine import LoadedEngine
from aotllm.serving.errors import ModelNotFound
from aotllm.serving.process import messages as wire
from aotllm.serving.process.failures import failure_of
from aotllm.serving.process.front_end_connection import FrontEndConnection
from aotllm.serving.process.hosted_model import HostedModel
from aotllm.serving.process.plain import plain
from aotllm.serving.process.plan import ServePlan
from aotllm.structured_outputs import Grammar

_GATHER_SECONDS = 2.0
"""Longest wait for what front ends have to say"""
_SEEN_SECONDS = 60.0
"""Longest wait for front ends to serve a new state"""


class EngineServer:
    """All on one event loop; engines are loaded in worker threads."""

    def __init__(self, plan: ServePlan) -> None:
        self._config = plan.executor_config()
        self._factory = plan.factory()
        self._verify = plan.verify
        self._models = {name: HostedModel(name, path, self._on_fault) for name, path in plan.engines.items()}
        self._loras = plan.loras
        self._tables: dict[str, dict[str, Any]] = {}
        self._connections: set[FrontEndConnection] = set()
        self._version = 0
        self._gathers = 0
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "stats": self._stats,
            "memory": self._memory,
            "load": self._load,
            "unload": self._unload,
            "load_lora": self._load_lora,
            "unload_lora": self._unload_lora,
            "table_put": self._table_put,
            "table_remove": self._table_remove,
            "gather": self._gather,
        }

    async def listen(self, sock: socket.socket) -> asyncio.Server:
        """Take connections of front ends; they learn the state at once, and again whenever it changes.

        Args:
            sock: a Unix socket that is bound.
        """
        return await asyncio.get_running_loop().create_unix_server(lambda: FrontEndConnection(self), sock=sock)

    async def start(self) -> None:
        """Load all engines. Raises what loading raises."""
        for name in self._models:
            await self._load(name)
        if self._loras:
            first = next(iter(self._models))
            for name, folder in self._loras.items():
                await self._load_lora(first, name, folder)

    async def stop(self) -> None:
        """End all requests and free the engines."""
        for model in self._models.values():
            await model.detach(drain=False)

    def memory(self) -> dict[str, Any]:
        """What the KV memory of each loaded engine buys, of plain values."""
        loaded = {name: model.loaded for name, model in self._models.items()}
        return {name: plain(engine.manager.memory()) for name, engine in loaded.items() if engine is not None}

    # --- front ends --------------------------------------------------------------------------------------------------

    def connected(self, connection: FrontEndConnection) -> None:
        """A front end is there."""
        self._connections.add(connection)
        connection.send(self._state())
        for table, entries in self._tables.items():
            for name, value in entries.items():
                connection.send(wire.TableChange(self._version, table, name, True, value))

    def disconnected(self, connection: FrontEndConnection) -> None:
        """A front end has gone, and with it all who wait for its requests."""
        self._connections.discard(connection)
        by_model: dict[str, list[int]] = {}
        for name, native_id in connection.requests.values():
            by_model.setdefault(name, []).append(native_id)
        for name, native_ids in by_model.items():
            self._models[name].drop(native_ids)

    def take(self, connection: FrontEndConnection, message: wire.ToEngine) -> None:
        """A message of a front end."""
        match message:
            case wire.Submit():
                if message.grammar is None:
                    self._submit(connection, message, None)
                else:
                    self._spawn(self._submit_with_grammar(connection, message, Grammar(*message.grammar)))  # type: ignore[arg-type]
            case wire.Cancel():
                self._cancel(connection, message)
            case wire.Query():
                self._spawn(self._answer(connection, message))
            case wire.Seen():
                connection.has_seen(message.version)
            case wire.Gathered():
                connection.has_answered(message.id, message.value)

    def _submit(self, connection: FrontEndConnection, message: wire.Submit, constraint: Any) -> None:
        try:
            model = self._models[message.model]
            if model.loaded is None:
                raise ModelNotFound(f"The model `{message.model}` is not loaded.")
            request = wire.manager_request(message.request, constraint)
            native_id = model.loaded.manager.submit(request)
        except Exception as error:
            connection.send(wire.Refused(message.id, failure_of(error)))
            return
        model.route(native_id, connection, message.id, request.n)
        connection.requests[message.id] = message.model, native_id
        connection.send(wire.Accepted(message.id))

    async def _submit_with_grammar(
        self, connection: FrontEndConnection, message: wire.Submit, grammar: Grammar
    ) -> None:
        connection.compiling.add(message.id)
        try:
            constraint = await asyncio.to_thread(self._loaded(message.model).grammars.compile_grammar, grammar)
            if message.id not in connection.compiling:
                raise Cancelled("the request was cancelled while its grammar was compiled")
        except Exception as error:
            connection.send(wire.Refused(message.id, failure_of(error)))
            return
        finally:
            connection.compiling.discard(message.id)
        if connection in self._connections:
            self._submit(connection, message, constraint)

    def _cancel(self, connection: FrontEndConnection, message: wire.Cancel) -> None:
        connection.compiling.discard(message.id)
        name, native_id = connection.requests.get(message.id, (None, 0))
        model = None if name is None else self._models[name].loaded
        if model is not None:
            model.manager.cancel(native_id, message.sequence_index)

    async def _answer(self, connection: FrontEndConnection, query: wire.Query) -> None:
        try:
            method = self._methods.get(query.method)
            if method is None:
                raise InvalidRequest(f"there is no method {query.method!r:.60}")
            answer = wire.Answer(query.id, await method(*query.args))
        except Exception as error:
            answer = wire.Answer(query.id, None, failure_of(error))
        connection.send(answer)

    # --- methods -----------------------------------------------------------------------------------------------------

    async def _stats(self, name: str) -> Any:
        return plain(self._loaded(name).manager.stats())

    async def _memory(self, name: str) -> Any:
        return plain(self._loaded(name).manager.memory())

    async def _load(self, name: str) -> None:
        model = self._known(name)
        async with self._changing:
            await self._retire(model)
            model.state, model.reason = "LOADING", ""
            self._announce()
            try:
                loaded = await asyncio.to_thread(LoadedEngine, model.path, self._config, self._verify, self._factory)
            except Exception as error:
                model.state, model.reason = "UNAVAILABLE", str(error)
                self._announce()
                raise
            model.attach(loaded)
            await self._publish()

    async def _unload(self, name: str) -> None:
        model = self._known(name)
        async with self._changing:
            await self._retire(model)
            model.state, model.reason = "UNAVAILABLE", "unloaded"
            await self._publish()

    async def _retire(self, model: HostedModel) -> None:
        if model.loaded is not None:
            model.state = "UNLOADING"
            await self._publish()
            await model.detach(drain=True)

    async def _load_lora(self, name: str, adapter: str, folder: str) -> None:
        await asyncio.to_thread(self._loaded(name).adapters.load, adapter, Path(folder))
        await self._publish()

    async def _unload_lora(self, name: str, adapter: str) -> None:
        await asyncio.to_thread(self._loaded(name).adapters.unload, adapter)
        await self._publish()

    async def _table_put(self, table: str, name: str, value: Any) -> bool:
        entries = self._tables.setdefault(table, {})
        if name in entries:
            return False
        entries[name] = value
        await self._publish(wire.TableChange(self._version + 1, table, name, True, value))
        return True

    async def _table_remove(self, table: str, name: str) -> Any:
        entries = self._tables.get(table, {})
        if name not in entries:
            return None
        value = entries.pop(name)
        await self._publish(wire.TableChange(self._version + 1, table, name, False))
        return value

    async def _gather(self, topic: str) -> list[Any]:
        self._gathers += 1
        number = self._gathers
        asked = [asyncio.ensure_future(connection.ask(number, topic)) for connection in self._connections]
        done, late = await asyncio.wait(asked, timeout=_GATHER_SECONDS)
        for task in late:
            task.cancel()
        return [answer for task in done if (answer := task.result()) is not None]

    # --- state -------------------------------------------------------------------------------------------------------

    def _known(self, name: str) -> HostedModel:
        if name not in self._models:
            raise ModelNotFound(f"The model `{name:.80}` does not exist. Known: {', '.join(self._models)}.")
        return self._models[name]

    def _loaded(self, name: str) -> LoadedEngine:
        loaded = self._known(name).loaded
        if loaded is None:
            raise ModelNotFound(f"The model `{name:.80}` is not loaded.")
        return loaded

    def _state(self) -> wire.State:
        models = [model.snapshot() for model in self._models.values()]
        return wire.State(self._version, models, self._config.timeout)

    def _announce(self, change: wire.TableChange | None = None) -> None:
        self._version += 1
        news = change or self._state()
        for connection in self._connections:
            connection.send(news)

    async def _publish(self, change: wire.TableChange | None = None) -> None:
        """Announce a change of a table, or else the state, and wait until all front ends serve it."""
        self._announce(change)
        waits = [asyncio.ensure_future(connection.until_seen(self._version)) for connection in self._connections]
        if waits:
            _, late = await asyncio.wait(waits, timeout=_SEEN_SECONDS)
            for wait in late:
                wait.cancel()

    def _on_fault(self, model: HostedModel, error: Exception) -> None:
        model.reason = str(error)
        for connection in list(self._connections):
            ids = [i for i, (name, _) in connection.requests.items() if name == model.name]
            connection.fail(ids, failure_of(error))
        self._announce()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
