"""Calls to a cluster's routers, with the API key in KAVERI_API_KEY. Imported by commands when they run."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from grpc import aio

from kaveri.cli.options import targets_of
from kaveri.client.api_key import find_api_key, key_metadata
from kaveri.client.targets import check_targets
from kaveri.domain.view import ClusterView
from kaveri.errors import ConfigError, KaveriError
from kaveri.rpc.server import open_channel
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc
from kaveri.wire.messages import status_from_proto
from kaveri.wire.status import error_of, is_answer

AnswerT = TypeVar("AnswerT")


def call_options(timeout_s: float) -> dict[str, Any]:
    """Build a gRPC call's keyword arguments: timeout and API key. Raises InvalidArgument for a malformed key."""
    return {"timeout": timeout_s, "metadata": key_metadata(find_api_key(None))}


@contextlib.asynccontextmanager
async def open_channels(target: str) -> AsyncIterator[dict[str, aio.Channel]]:
    """Open a gRPC channel to each router in --target, by address. Raises InvalidArgument for an invalid address."""
    async with contextlib.AsyncExitStack() as stack:
        yield {one: await stack.enter_async_context(open_channel(one)) for one in check_targets(targets_of(target))}


async def first_answer(
    channels: Mapping[str, aio.Channel], ask: Callable[[str, aio.Channel], Awaitable[AnswerT]]
) -> AnswerT:
    """Call `ask` with each router's address and channel until one responds; return its result or raise its error. Skips
    routers that are unreachable or for which `ask` raises ConfigError. If all are, raises the first such error."""
    failure: KaveriError | None = None
    for target, channel in channels.items():
        try:
            return await ask(target, channel)
        except aio.AioRpcError as error:
            found = error_of(error, peer=target)
            if is_answer(error):
                raise found from error
            failure = failure or found
        except ConfigError as error:
            failure = failure or error
    assert failure is not None
    raise failure


async def cluster_view(channel: aio.Channel, timeout_s: float) -> ClusterView:
    stub = cluster_pb2_grpc.ClusterServiceStub(channel)
    shown = await stub.GetClusterView(cluster_pb2.GetClusterViewRequest(), **call_options(timeout_s))
    instances, incompatible = (
        {one.record.instance_id: one for one in map(status_from_proto, statuses)}
        for statuses in (shown.instances, shown.incompatible)
    )
    return ClusterView(instances, shown.store_connected, incompatible)
