"""Client of several sessions with manual calls, and real routers that serve it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from kaveri.models import KAVERI_TINY
from kaveri.rpc.server import open_channel
from kaveri.text.generation_config import read_sampling_defaults
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.v1.inference_pb2_grpc import InferenceServiceStub
from services.router.config import RouterConfig
from services.router.service import Router, router_host

GRACE_S = 5.0
SECRET = b"0123456789abcdef"
WAIT_S = 30.0


@dataclass
class SessionClient:
    """Client that keeps one request over several sessions."""

    prompt: list[int]
    params: dict[str, Any]
    request_id: str = "a"
    secret: bytes = SECRET
    session: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    owner: inference_pb2.OwnerHint | None = None
    max_tokens: int = 0
    routers: list[str] = field(default_factory=list)
    last: inference_pb2.GenerateResponse | None = None

    def message(self, **changes: Any) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(
            request_id=self.request_id,
            token_ids=inference_pb2.TokenIds(ids=self.prompt),
            params=sampling_pb2.SamplingParams(**{"seed": 0, **self.params}),
            session=self.session,
            secret=self.secret,
        )
        if self.session:
            request.received.token_ids.extend(self.token_ids)
            request.received.characters = len(self.text)
            request.received.max_tokens = self.max_tokens
            if self.owner is not None:
                request.received.owner.CopyFrom(self.owner)
        for name, value in changes.items():
            setattr(request, name, value)
        return request

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        if response.token_ids:
            assert response.index == len(self.token_ids), "tokens twice, or a gap"
        self.token_ids += response.token_ids
        self.text += response.text
        self.logprobs += [entry.logprob for entry in response.logprobs]
        if response.HasField("owner"):
            self.owner = response.owner
        self.max_tokens = response.max_tokens or self.max_tokens
        self.routers = list(response.routers) or self.routers
        if response.finish_reason:
            self.last = response

    async def read(self, call: Any, until: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.token_ids) < until:
                response = await call.read()
                if response is aio.EOF:
                    return
                self.take(response)

    async def finish(self, call: Any) -> None:
        await self.read(call, 2**31)
        assert self.last is not None


class SessionRouters:
    def __init__(self, cluster: Any, tokenizer: ModelTokenizer) -> None:
        self.cluster = cluster
        self.tokenizer = tokenizer
        self.by_name: dict[str, Router] = {}
        self._addresses: dict[str, str] = {}
        self._channels: dict[str, aio.Channel] = {}
        self._serving: dict[str, asyncio.Task[int]] = {}

    async def start(self, name: str, **settings: Any) -> Router:
        config = RouterConfig(
            **{
                "instance_id": name,
                "heartbeat_interval_s": 0.02,
                "model": KAVERI_TINY,
                "served_model_name": "fake",
                **settings,
            }
        )
        defaults = read_sampling_defaults(config.generation_config, config.model)
        router = self.by_name[name] = Router(config, await self.cluster.store(), self.tokenizer, defaults)
        host = router_host(router)
        self._serving[name] = asyncio.create_task(host.serve(asyncio.Event()))
        await asyncio.wait_for(host.started.wait(), WAIT_S)
        self._addresses[name] = host.address
        self._channels[name] = open_channel(host.address)
        return router

    def address(self, name: str) -> str:
        return self._addresses[name]

    def generate(
        self,
        name: str,
        message: inference_pb2.GenerateRequest,
        timeout_s: float = WAIT_S,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        return InferenceServiceStub(self._channels[name]).Generate(message, timeout=timeout_s, metadata=metadata)

    async def cancel(self, name: str, request_id: str) -> bool:
        request = inference_pb2.CancelRequest(request_id=request_id)
        return (await InferenceServiceStub(self._channels[name]).Cancel(request, timeout=WAIT_S)).found

    async def cut(self, name: str) -> None:
        """Disconnect the router from clients and instances."""
        router = self.by_name.pop(name)

        async def mute(*_: Any, **__: Any) -> None:
            return None

        router.feeds._abort_at = lambda *_: None  # type: ignore[method-assign]
        router.placer._prefills._abort = mute  # type: ignore[method-assign,assignment]
        router.claims.close = lambda claim: None  # type: ignore[method-assign,assignment]
        await self._channels.pop(name).close()
        await self._end(name)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        for name in list(self._serving):
            await self._end(name)

    async def _end(self, name: str) -> None:
        serving = self._serving.pop(name)
        serving.cancel()
        await asyncio.wait((serving,), timeout=WAIT_S)


def computed(cluster: Any, role: str = "prefill") -> float:
    return sum(instance.metric("kaveri_prefill_tokens_total") for instance in cluster.instances)
