"""`Rpcs`: the RPCs with one request and one response. Each gives a message, or a dict that it is made from."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from aotllm.serving.errors import ModelNotFound
from aotllm.serving.kserve.descriptions import model_config, model_metadata, server_metadata
from aotllm.serving.kserve.errors import ModelNotReady, NotImplementedHere
from aotllm.serving.kserve.grpc_codec import request_of, response_of
from aotllm.serving.kserve.inference import Inference
from aotllm.serving.kserve.model_control import ModelControl

Answer = dict[str, Any]


class OpenConnection:
    """A client that leaves by cancelling: gRPC then cancels the coroutine that serves it."""

    async def receive(self) -> NoReturn:
        """Never returns."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody resolves this future")


class Rpcs:
    """Methods have the names of the RPCs, and raise AotllmError."""

    def __init__(self, inference: Inference, control: ModelControl) -> None:
        self._inference = inference
        self._context = inference.context
        self._control = control

    async def ServerLive(self, message: Any, rpc: Any) -> Answer:
        """No engine has failed."""
        return {"live": server_live(self._inference)}

    async def ServerReady(self, message: Any, rpc: Any) -> Answer:
        """There are engines, all of them take requests, and the server does not end."""
        return {"ready": self._context.ready}

    async def ModelReady(self, message: Any, rpc: Any) -> Answer:
        """False for what does not exist, too."""
        return {"ready": model_ready(self._inference, message.name, message.version)}

    async def ServerMetadata(self, message: Any, rpc: Any) -> Answer:
        """Name, version, extensions."""
        return server_metadata()

    async def ModelMetadata(self, message: Any, rpc: Any) -> Answer:
        """Inputs and outputs."""
        return model_metadata(self._inference.models.get(message.name, message.version))

    async def ModelConfig(self, message: Any, rpc: Any) -> Answer:
        """Inputs, outputs and how requests are batched."""
        model = self._inference.models.get(message.name, message.version)
        return {"config": model_config(model, self._context.options.max_prompts)}

    async def ModelStatistics(self, message: Any, rpc: Any) -> Answer:
        """Counts and times since the start."""
        return await self._control.statistics(message.name, message.version)

    async def ModelInfer(self, message: Any, rpc: Any) -> Any:
        """A ModelInferResponse with everything. A stream of responses needs ModelStreamInfer."""
        call = self._inference.call("ModelInfer", dict(rpc.invocation_metadata() or ()))
        request = request_of(message, self._inference.shared_memory)
        generation = self._inference.generation(request, call)
        if generation.stream:
            raise NotImplementedHere("ModelInfer gives one response: for stream=true call ModelStreamInfer")
        tensors = await self._inference.whole(generation, call, OpenConnection())
        return response_of(request, tensors, self._inference.shared_memory)

    async def RepositoryIndex(self, message: Any, rpc: Any) -> Answer:
        """All models with their states."""
        return {"models": self._control.index(message.repository_name, message.ready)}

    async def RepositoryModelLoad(self, message: Any, rpc: Any) -> Answer:
        """Returns when the model is ready."""
        await self._control.load(message.model_name, message.repository_name, dict(message.parameters))
        return {}

    async def RepositoryModelUnload(self, message: Any, rpc: Any) -> Answer:
        """Returns when the model is unloaded."""
        await self._control.unload(message.model_name, message.repository_name)
        return {}

    async def SystemSharedMemoryStatus(self, message: Any, rpc: Any) -> Answer:
        """The registered regions."""
        return {"regions": self._inference.shared_memory.regions(message.name)}

    async def SystemSharedMemoryRegister(self, message: Any, rpc: Any) -> Answer:
        """Registers a region."""
        await self._inference.shared_memory.register(message.name, message.key, message.offset, message.byte_size)
        return {}

    async def SystemSharedMemoryUnregister(self, message: Any, rpc: Any) -> Answer:
        """Forgets a region, or all."""
        await self._inference.shared_memory.unregister(message.name)
        return {}

    async def CudaSharedMemoryStatus(self, message: Any, rpc: Any) -> Answer:
        """There are never any."""
        return {}

    async def CudaSharedMemoryRegister(self, message: Any, rpc: Any) -> Answer:
        """Refused."""
        raise NotImplementedHere(NO_CUDA_MEMORY)

    async def CudaSharedMemoryUnregister(self, message: Any, rpc: Any) -> Answer:
        """There is nothing to forget."""
        return {}

    async def TraceSetting(self, message: Any, rpc: Any) -> Answer:
        """Refused."""
        raise NotImplementedHere(NO_TRACE_SETTING)

    async def LogSettings(self, message: Any, rpc: Any) -> Answer:
        """Refused."""
        raise NotImplementedHere(NO_LOG_SETTINGS)


NO_CUDA_MEMORY = "CUDA shared memory is not implemented: use system shared memory, or send tensors in the request"
NO_TRACE_SETTING = "trace settings cannot be changed by clients: they are set when the server is started"
NO_LOG_SETTINGS = "log settings cannot be changed by clients: they are set when the server is started"


def server_live(inference: Inference) -> bool:
    """No loaded engine has failed. A server whose engines are all unloaded lives, too: they can be loaded again."""
    return all(engine.alive for engine in inference.context.repository.engines().values())


def model_ready(inference: Inference, name: str, version: str) -> bool:
    """A model takes requests."""
    try:
        engine = inference.models.get(name, version).served.engine
    except (ModelNotFound, ModelNotReady):
        return False
    return engine.alive and not inference.context.draining
