"""Clients that disconnect, do not read, send slowly or too much."""

import asyncio
import socket
import time

import pytest

from kaveri.telemetry.readiness import is_ready
from tests.services.gateway.conftest import (
    WITHIN_S,
    GatewayUnderTest,
    read_answer,
    read_head,
    request_bytes,
    run_gateway,
)
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import eventually

STREAM = b'{"prompt": [300, 301], "max_tokens": 8000, "stream": true, "ignore_eos": true}'
SEVERAL = STREAM.replace(b"[300, 301]", b"[[300], [301], [302]]").replace(b"{", b'{"n": 2, ')
WHOLE = b'{"prompt": [300, 301], "max_tokens": 8000, "ignore_eos": true}'


async def ended(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(WITHIN_S):
            return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(("body", "held"), [(STREAM, False), (SEVERAL, False), (WHOLE, False), (STREAM, True)])
async def test_a_vanished_client_cancels_its_request_everywhere_at_once(
    gateway: GatewayUnderTest, cluster: ScriptedCluster, body: bytes, held: bool
) -> None:
    prefill, decode = cluster.prefills["prefill-0"], cluster.decodes["decode-0"]
    if held:
        prefill.hold.add("first_token")
    else:
        decode.pause_at = 5
    _, writer = await gateway.connect()
    writer.write(request_bytes("POST", "/v1/completions", body))
    await eventually(lambda: bool(prefill.waiting_requests) if held else decode.is_paused)
    gone_s = time.monotonic()
    writer.transport.abort()
    await eventually(lambda: not len(gateway.router.router.table))
    await eventually(lambda: not decode.running and not gateway.gateway.app.answering)
    assert time.monotonic() - gone_s < 5.0, "a second on an idle machine"
    cluster.let_all_go()


async def test_a_client_that_does_not_read_loses_its_request_and_its_connection(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, slow_reader_s=0.3) as gateway:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", gateway.port))
        body = STREAM.replace(b"}", b', "return_token_ids": true}')
        try:
            await loop.sock_sendall(raw, request_bytes("POST", "/v1/completions", body))
            await eventually(lambda: bool(gateway.gateway.app.answering), WITHIN_S)
            await eventually(lambda: not gateway.gateway.app.answering, WITHIN_S)
            await eventually(lambda: not gateway.gateway.server.state.connections, WITHIN_S)
            await eventually(lambda: not cluster.decodes["decode-0"].running)
        finally:
            raw.close()


async def test_a_client_that_does_not_read_does_not_slow_others(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, slow_reader_s=30.0) as gateway:
        _, writer = await gateway.connect()
        writer.write(request_bytes("POST", "/v1/completions", STREAM))
        await eventually(lambda: bool(gateway.gateway.app.answering))
        assert (await gateway.complete(stream=True, max_tokens=20)).events
        writer.transport.abort()
        await eventually(lambda: not gateway.gateway.app.answering)


async def test_a_head_that_comes_too_slowly_ends_the_connection(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, slow_sender_s=0.2) as gateway:
        for start in (b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: "):
            reader, writer = await gateway.connect()
            writer.write(start)
            assert await ended(reader) == b""
            writer.close()


async def test_a_body_that_comes_too_slowly_is_408(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, slow_sender_s=0.2) as gateway:
        reader, writer = await gateway.connect()
        writer.write(request_bytes("POST", "/v1/completions", WHOLE)[:-5])
        got = await read_answer(reader)
        assert (got.status, got.error["code"]) == (408, "slow_request")
        assert await ended(reader) == b""
        writer.close()


async def test_a_second_head_on_a_connection_has_the_same_limit(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, slow_sender_s=0.3) as gateway:
        reader, writer = await gateway.connect()
        for _ in range(2):
            writer.write(b"GET /version HTTP/1.1\r\nhost: test\r\n\r\n")
            assert (await read_answer(reader)).status == 200
        writer.write(b"GET /ver")
        assert await ended(reader) == b""
        writer.close()


async def test_an_idle_connection_is_closed(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, idle_s=0.2) as gateway:
        reader, writer = await gateway.connect()
        writer.write(b"GET /version HTTP/1.1\r\nhost: test\r\n\r\n")
        assert (await read_answer(reader)).status == 200
        assert await ended(reader) == b""
        writer.close()


async def test_endless_headers_are_431(cluster: ScriptedCluster) -> None:
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with run_gateway(cluster, max_header_bytes=4096) as gateway:
        for head in (
            b"GET /health HTTP/1.1\r\nx: " + b"a" * 5000,
            b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 2000,
            b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: test\r\n\r\n",
            chunked + b"1;" + b"a" * 9000,
            chunked + b"0\r\nx: " + b"a" * 9000,
        ):
            reader, writer = await gateway.connect()
            for first in range(0, len(head), 1024):
                writer.write(head[first : first + 1024])
                await asyncio.sleep(0)
            assert (await read_head(reader))[0] == 431, head[:100]
            await ended(reader)
            writer.close()


async def test_what_is_not_http_is_400_and_the_end(gateway: GatewayUnderTest) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"nonsense " * 20 + b"\r\n\r\n",
        b"GET * HTTP/1.1\r\n\r\n",
    ):
        reader, writer = await gateway.connect()
        writer.write(data)
        assert (await read_answer(reader)).status in (400, 404), data
        writer.close()
        await ended(reader)


async def test_a_body_that_is_too_large_is_413(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, max_body_bytes=2048) as gateway:
        assert (await gateway.complete(prompt="x" * 4000)).status == 413
        reader, writer = await gateway.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(5):
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
        writer.write(b"0\r\n\r\n")
        got = await read_answer(reader)
        assert (got.status, got.error["code"]) == (413, "request_too_large")
        writer.close()


async def test_bodies_of_all_requests_together_are_limited(cluster: ScriptedCluster) -> None:
    cluster.decodes["decode-0"].may_step.clear()
    async with run_gateway(cluster, max_bodies_bytes=4096) as gateway:
        large = {"prompt": "x " * 1500, "max_tokens": 4}
        first = asyncio.create_task(gateway.ask("/v1/completions", large))
        await eventually(lambda: bool(gateway.gateway.app.answering))
        second = await gateway.ask("/v1/completions", large)
        assert (second.status, second.error["code"]) == (503, "service_unavailable")
        assert int(second.headers["retry-after"]) >= 1
        cluster.let_all_go()
        assert (await first).status == 200
        assert (await gateway.ask("/v1/completions", large)).status == 200


async def test_a_connection_too_many_is_503_and_the_others_go_on(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, max_connections=3) as gateway:
        open_ones = [await gateway.connect() for _ in range(3)]
        await eventually(lambda: len(gateway.gateway.server.state.connections) == 3)
        got = await gateway.ask("/version")
        assert (got.status, got.error["code"]) == (503, "too_many_connections")
        open_ones[0][1].close()
        await eventually(lambda: len(gateway.gateway.server.state.connections) < 3)
        assert (await gateway.ask("/version")).status == 200
        for _, writer in open_ones:
            writer.close()


async def test_small_writes_leave_at_once(gateway: GatewayUnderTest) -> None:
    _, writer = await gateway.connect()
    await eventually(lambda: bool(gateway.gateway.server.state.connections))
    (connection,) = gateway.gateway.server.state.connections
    raw = connection.transport.get_extra_info("socket")
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    writer.close()


async def test_a_drain_finishes_answers_closes_idle_connections_and_refuses_new_ones(cluster: ScriptedCluster) -> None:
    decode = cluster.decodes["decode-0"]
    async with run_gateway(cluster) as gateway:
        decode.pause_at = 5
        going = asyncio.create_task(gateway.complete(stream=True, max_tokens=20))
        await eventually(lambda: decode.is_paused)
        idle_reader, idle_writer = await gateway.connect()
        await eventually(lambda: len(gateway.gateway.server.state.connections) == 2)
        gateway.stopping.set()
        assert await ended(idle_reader) == b""
        idle_writer.close()
        with pytest.raises(ConnectionError):
            await gateway.connect()
        assert not is_ready()
        decode.may_step.set()
        assert (await going).events[-1]["choices"][0]["finish_reason"] == "length"
        assert await asyncio.wait_for(gateway.serving, WITHIN_S) == 0


async def test_answers_that_outlast_the_drain_end_with_an_error_event(cluster: ScriptedCluster) -> None:
    decode = cluster.decodes["decode-0"]
    async with run_gateway(cluster, drain_timeout_s=0.2) as gateway:
        decode.pause_at = 5
        going = asyncio.create_task(gateway.complete(stream=True, max_tokens=20))
        await eventually(lambda: decode.is_paused)
        gateway.stopping.set()
        body = (await going).body
        assert b'"error"' in body
        assert b"[DONE]" not in body
        decode.may_step.set()
