import asyncio
import os
import time

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kaveri.errors import ConfigError, InvalidArgument
from kaveri.rpc.server import MAX_MESSAGE_BYTES, RpcServer, check_health, open_channel
from kaveri.v1 import feed_pb2, feed_pb2_grpc
from kaveri.wire.status import error_of
from tests.library.rpc.echo_service import SERVICE_NAME, EchoService, serving

WAIT_S = 60.0


async def health_of(channel: aio.Channel, name: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return int(response.status)


@pytest.mark.parametrize("name", ["", SERVICE_NAME])
async def test_health_is_serving_between_ready_and_drain(name: str) -> None:
    async with serving(EchoService()) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        states = [await health_of(channel, name)]
        await server.ready()
        states.append(await health_of(channel, name))
        await server.drain()
        states.append(await health_of(channel, name))
        not_serving, is_serving = (health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING)
        assert states == [not_serving, is_serving, not_serving]
        # Draining refuses nothing by itself: the service decides what it still accepts.
        await feed_pb2_grpc.FeedServiceStub(channel).Abort(feed_pb2.AbortRequest())


async def test_check_health_tells_serving_from_not_serving_from_nobody() -> None:
    async with serving(EchoService()) as server:
        address = f"127.0.0.1:{server.port}"
        assert not await check_health(address, 2)
        await server.ready()
        assert await check_health(address, 2)
    started_s = time.monotonic()
    assert not await asyncio.wait_for(check_health(address, 0.2), 30)
    assert time.monotonic() - started_s < 10


async def test_reflection_lists_the_services() -> None:
    async with serving(EchoService()) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        response = await call.read()
        call.cancel()
    names = {service.name for service in response.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_a_config_error_at_once() -> None:
    async with serving(EchoService()) as first:
        second = RpcServer("127.0.0.1", first.port, [])
        started_s = time.monotonic()
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{first.port}.*in use"):
            await second.start()
        assert time.monotonic() - started_s < 10
        async with open_channel(f"127.0.0.1:{first.port}") as channel:
            await feed_pb2_grpc.FeedServiceStub(channel).Abort(feed_pb2.AbortRequest())


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
async def test_an_address_of_somebody_else_is_a_config_error(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        await RpcServer(host, 0, []).start()


async def test_a_message_over_the_limit_is_refused_and_the_connection_goes_on() -> None:
    async with serving(EchoService()) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = feed_pb2_grpc.FeedServiceStub(channel)
        stream = stub.Follow(feed_pb2.FollowRequest())
        await stream.read()
        fits = feed_pb2.AttachRequest(request_id="x" * (MAX_MESSAGE_BYTES - 100))
        await stub.Attach(fits)
        with pytest.raises(aio.AioRpcError) as ours:
            await stub.Attach(feed_pb2.AttachRequest(request_id="x" * (MAX_MESSAGE_BYTES + 1)))
        assert isinstance(error_of(ours.value), InvalidArgument)
        assert not stream.done()
        stream.cancel()


async def test_a_strangers_message_over_the_limit_disturbs_no_other_stream() -> None:
    async with serving(EchoService()) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        stream = feed_pb2_grpc.FeedServiceStub(channel).Follow(feed_pb2.FollowRequest())
        await stream.read()
        async with aio.insecure_channel(f"127.0.0.1:{server.port}") as unlimited:
            with pytest.raises(aio.AioRpcError) as theirs:
                await feed_pb2_grpc.FeedServiceStub(unlimited).Attach(
                    feed_pb2.AttachRequest(request_id="x" * (2 * MAX_MESSAGE_BYTES))
                )
        assert theirs.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error_of(theirs.value), InvalidArgument)
        await feed_pb2_grpc.FeedServiceStub(channel).Abort(feed_pb2.AbortRequest())
        assert not stream.done()
        stream.cancel()


GARBAGE = {
    "http1": b"GET / HTTP/1.1\r\nHost: kaveri\r\n\r\n",
    "random": os.urandom(4096),
    "preface and then garbage": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 512,
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "nothing": b"",
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_on_the_port_disturbs_nothing_else(name: str) -> None:
    async with serving(EchoService()) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = feed_pb2_grpc.FeedServiceStub(channel)
        stream = stub.Follow(feed_pb2.FollowRequest())
        await stream.read()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GARBAGE[name])
        await writer.drain()
        if GARBAGE[name]:
            # The server hangs up: either at once or with what it has to say first.
            await asyncio.wait_for(_read_to_the_end(reader), WAIT_S)
        await stub.Abort(feed_pb2.AbortRequest(), timeout=WAIT_S)
        assert not stream.done()
        stream.cancel()
        writer.close()


async def test_stop_cancels_what_the_grace_did_not_end() -> None:
    service = EchoService()
    async with serving(service) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        stream = feed_pb2_grpc.FeedServiceStub(channel).Follow(feed_pb2.FollowRequest())
        await stream.read()
        assert service.open_streams == 1
        await asyncio.wait_for(server.stop(0.1), WAIT_S)
        with pytest.raises(aio.AioRpcError):
            await asyncio.wait_for(stream.read(), WAIT_S)
        await _no_stream_is_open(service)


async def test_a_channel_finds_a_server_that_came_back_within_seconds() -> None:
    async with serving(EchoService()) as server:
        port = server.port
        channel = open_channel(f"127.0.0.1:{port}")
        stub = feed_pb2_grpc.FeedServiceStub(channel)
        await stub.Abort(feed_pb2.AbortRequest())
    with pytest.raises(aio.AioRpcError):
        await stub.Abort(feed_pb2.AbortRequest(), timeout=WAIT_S)
    again = RpcServer("127.0.0.1", port, [SERVICE_NAME])
    again.add(lambda server: feed_pb2_grpc.add_FeedServiceServicer_to_server(EchoService(), server))
    await again.start()
    started_s = time.monotonic()
    await stub.Abort(feed_pb2.AbortRequest(), timeout=WAIT_S, wait_for_ready=True)
    assert time.monotonic() - started_s < 5
    await channel.close()
    await again.stop(0)


async def _read_to_the_end(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(4096):
            pass
    except ConnectionResetError:
        pass


async def _no_stream_is_open(service: EchoService) -> None:
    async with asyncio.timeout(WAIT_S):
        while service.open_streams:  # noqa: ASYNC110 - the service double counts, it does not signal
            await asyncio.sleep(0.005)
