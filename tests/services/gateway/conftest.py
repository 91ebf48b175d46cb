"""A gateway in the test process, on real sockets, in front of a real router and scripted instances."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from kaveri.client.async_client import AsyncClient
from kaveri.cluster.memory_store import MemoryStore
from kaveri.text.tokenizer import ModelTokenizer
from services.gateway.config import GatewayConfig
from services.gateway.service import Gateway, gateway_host
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster, scripted_cluster

WITHIN_S = 60.0


@dataclass
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found

    @property
    def events(self) -> list[Any]:
        """Return the JSON events of a stream, without the last one, "[DONE]"."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        assert parts.pop() == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts]


@dataclass
class GatewayUnderTest:
    gateway: Gateway
    port: int
    router: RouterUnderTest
    sdk: AsyncClient
    stopping: asyncio.Event
    serving: asyncio.Task[int]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def connection(self) -> Any:
        (found,) = self.gateway.server.state.connections
        return found

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(
        self, path: str, body: Any = None, *, method: str = "", headers: dict[str, str] | None = None
    ) -> HttpAnswer:
        """Send one request on a new connection. body: sent as JSON, or as it is if bytes."""
        reader, writer = await self.connect()
        try:
            data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            writer.write(request_bytes(method or ("GET" if body is None else "POST"), path, data, headers or {}))
            async with asyncio.timeout(WITHIN_S):
                return await read_answer(reader)
        finally:
            writer.close()

    async def complete(self, **fields: Any) -> HttpAnswer:
        """POST /v1/completions. Without other fields: greedy, 5 tokens."""
        return await self.ask(
            "/v1/completions", {"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0, **fields}
        )

    async def chat(self, **fields: Any) -> HttpAnswer:
        messages = [{"role": "user", "content": "hello"}]
        return await self.ask(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0, **fields}
        )


def request_bytes(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """Encode a request with "Connection: close"."""
    lines = [f"{method} {path} HTTP/1.1", "host: test", "connection: close", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    named = (line.split(": ", 1) for line in head[1:] if line)
    headers = {name.lower(): value for name, value in named}
    return int(head[0].split(" ")[1]), headers


async def read_answer(reader: asyncio.StreamReader) -> HttpAnswer:
    status, headers = await read_head(reader)
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return HttpAnswer(status, headers, body)


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    async with scripted_cluster(tokenizer) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def run_gateway(
    cluster: ScriptedCluster,
    router_max_requests: int = 1024,
    generation_config: str = "auto",
    reasoning_parser: str = "auto",
    **settings: Any,
) -> AsyncIterator[GatewayUnderTest]:
    """Run a gateway with one router for this cluster; assert at the end that nothing leaked."""
    async with (
        cluster.router(
            max_requests=router_max_requests, generation_config=generation_config, reasoning_parser=reasoning_parser
        ) as router,
        MemoryStore(cluster.cluster) as store,
        AsyncClient(router.address) as sdk,
    ):
        config = GatewayConfig(**{"instance_id": "gateway-0", "port": 0, "drain_timeout_s": 5.0, **settings})
        async with AsyncClient(router.address, timeout_s=config.request_timeout_s) as client:
            gateway, stopping = Gateway(config, client, store), asyncio.Event()
            host = gateway_host(gateway)
            serving = asyncio.create_task(host.serve(stopping))
            await host.started.wait()
            try:
                yield GatewayUnderTest(gateway, gateway.server.port, router, sdk, stopping, serving)
            finally:
                stopping.set()
                assert await asyncio.wait_for(serving, WITHIN_S) == 0
            assert not gateway.app.answering
            assert not gateway.server.state.connections
            assert not gateway.server.state.tasks


@pytest.fixture
async def gateway(cluster: ScriptedCluster) -> AsyncIterator[GatewayUnderTest]:
    async with run_gateway(cluster) as gateway:
        yield gateway
