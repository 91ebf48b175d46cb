import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kaveri.errors import KaveriError, Unavailable
from kaveri.v1 import feed_pb2, feed_pb2_grpc
from kaveri.wire.status import abort
from tests.services.router.scripted_decode import ScriptedDecode
from tests.services.router.scripted_prefill import ScriptedPrefill


class ScriptedFeed(feed_pb2_grpc.FeedServiceServicer):
    def __init__(self, prefill: ScriptedPrefill | None = None, decode: ScriptedDecode | None = None) -> None:
        self._prefill = prefill
        self._decode = decode

    async def Follow(  # noqa: N802
        self, request: feed_pb2.FollowRequest, context: Any
    ) -> AsyncIterator[feed_pb2.FollowResponse]:
        if self._decode is None:
            assert self._prefill is not None
            yield feed_pb2.FollowResponse(incarnation=self._prefill.incarnation)
            async for message in self._prefill.follow(request.router_id):
                yield message
        elif self._prefill is None:
            async for message in self._decode.follow(request):
                yield message
        else:
            async for message in _merged(self._decode.follow(request), self._prefill.follow(request.router_id)):
                yield message

    async def Attach(  # noqa: N802
        self, request: feed_pb2.AttachRequest, context: Any
    ) -> feed_pb2.AttachResponse:
        instance = self._prefill if request.at_prefill else self._decode
        assert instance is not None
        try:
            if request.incarnation not in (0, instance.incarnation):
                raise Unavailable("the instance has restarted")
            if isinstance(instance, ScriptedPrefill):
                return instance.attach(request)
            return await instance.attach(request)
        except KaveriError as error:
            await abort(context, error)

    async def Abort(  # noqa: N802
        self, request: feed_pb2.AbortRequest, context: Any
    ) -> feed_pb2.AbortResponse:
        if request.give_back:
            assert self._prefill is not None
            await self._prefill.give_back(context)
            return feed_pb2.AbortResponse()
        if self._prefill is not None:
            for name in request.attempts:
                self._prefill.abort(name)
        if self._decode is not None:
            self._decode.abort(request)
        return feed_pb2.AbortResponse()


async def _merged(
    first: AsyncIterator[feed_pb2.FollowResponse], second: AsyncIterator[feed_pb2.FollowResponse]
) -> AsyncIterator[feed_pb2.FollowResponse]:
    """Messages of both, beginning with one of `first`."""
    yield await anext(first)
    messages: asyncio.Queue[feed_pb2.FollowResponse] = asyncio.Queue(maxsize=1)

    async def pump(source: AsyncIterator[feed_pb2.FollowResponse]) -> None:
        async for message in source:
            await messages.put(message)

    async with asyncio.TaskGroup() as group:
        pumps = [group.create_task(pump(source)) for source in (first, second)]
        try:
            while True:
                yield await messages.get()
        finally:
            for task in pumps:
                task.cancel()
