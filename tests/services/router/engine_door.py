import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from kaveri.errors import InvalidArgument
from kaveri.wire.status import error_of
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster
from tests.services.router.scripted_answers import PROMPT

WITHIN_S = 60.0


@dataclass
class EngineDoor:
    router: RouterUnderTest
    stub: Any

    async def ask(self, request: Any, timeout_s: float = WITHIN_S) -> list[Any]:
        return [response async for response in self.stub.Generate(request, timeout=timeout_s)]

    async def refusal(self, request: Any) -> InvalidArgument:
        with pytest.raises(aio.AioRpcError) as refused:
            await self.ask(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
        error = error_of(refused.value)
        assert isinstance(error, InvalidArgument)
        return error


@contextlib.asynccontextmanager
async def open_door(cluster: ScriptedCluster, **settings: Any) -> AsyncIterator[EngineDoor]:
    async with cluster.router(vllm_grpc=True, **settings) as router:
        yield EngineDoor(router, vllm_engine_pb2_grpc.VllmEngineStub(router.channel))


def asks(stream: bool = False, request_id: str = "", **params: Any) -> Any:
    """A greedy request for 20 tokens unless `params` differ."""
    return vllm_engine_pb2.GenerateRequest(
        request_id=request_id,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=PROMPT),
        sampling_params=vllm_engine_pb2.SamplingParams(**{"temperature": 0, "max_tokens": 20, **params}),
        stream=stream,
    )
