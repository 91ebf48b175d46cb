"""Direct reads: reads answers from the decode instances that generate them, over one stream per instance. An answer
that cannot be read directly comes from its router, which sends the missing part."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine

from grpc import aio

from kaveri.domain.silence import SilenceWatch
from kaveri.feeds.expiring import ExpiringMap
from kaveri.rpc.server import open_channel
from kaveri.rpc.tls import RpcTls
from kaveri.timeouts import CALL_TIMEOUT_S, SUSPECT_AFTER_S, TICK_S
from kaveri.v1 import feed_pb2, inference_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.wire.status import is_answer

_AVOID_S = 10.0
"""Seconds for which an instance is not read after it was unreachable, silent or broke off its stream."""
_MAX_AVOIDED = 1024
MAX_UNREAD_BYTES = 1 << 20
"""Max unread bytes of one answer; after more, the rest comes from its router."""
_PIECE_BYTES = 256
"""Approximate memory of a queued response besides its content."""
_IDLE_S = 30.0
"""Time after which a stream without answers is closed."""


class DirectRead:
    """Read of one answer from its decode instance, past the router. May repeat what the client has."""

    def __init__(self, key: tuple[str, int], wake: Callable[[], None]) -> None:
        """key: request id and session number. wake: called on every change."""
        self.key = key
        self.wake = wake
        self.unread_bytes = 0
        self.requested = False
        """True once the instance may send the answer."""
        self.ended = False
        """True if no further response will come; the router sends the rest."""
        self.broken = False
        """True if the read failed after it was requested: the router may still withhold tokens."""
        self._pieces: deque[inference_pb2.GenerateResponse] = deque()

    def put(self, piece: inference_pb2.GenerateResponse) -> None:
        """Append a copy of the next response: a part of a message would keep the whole message in memory."""
        own = inference_pb2.GenerateResponse()
        own.CopyFrom(piece)
        self._pieces.append(own)
        self.unread_bytes += _PIECE_BYTES + own.ByteSize()

    def take(self) -> inference_pb2.GenerateResponse | None:
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        self.unread_bytes -= _PIECE_BYTES + piece.ByteSize()
        return piece

    def end(self, *, failed: bool = False) -> None:
        if not self.ended:
            self.ended, self.broken = True, failed and self.requested
            self.wake()


class _Instance:
    def __init__(self, address: str, channel: aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.stub = FeedServiceStub(channel)
        self.reader_id = secrets.token_hex(16)
        self.call = self.stub.Follow(feed_pb2.FollowRequest(form=feed_pb2.FORM_TEXT, reader_id=self.reader_id))
        self.reads: dict[tuple[str, int], DirectRead] = {}
        self.opened: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Incarnation of the instance, once its stream is open. Cancelled if it cannot be reached."""
        self.idle_since_s = time.monotonic()

    def drop(self, read: DirectRead) -> None:
        """Stop reading an answer from this instance; ignore its later responses. Idempotent."""
        if self.reads.get(read.key) is read:
            del self.reads[read.key]
            if not self.reads:
                self.idle_since_s = time.monotonic()


class DirectStreams:
    """A client's streams of answers from decode instances, one per instance. Not thread-safe."""

    def __init__(self, tls: RpcTls | None = None) -> None:
        self._tls = tls
        self._instances: dict[str, _Instance] = {}
        self._avoided: ExpiringMap[str, bool] = ExpiringMap(_AVOID_S, max_count=_MAX_AVOIDED)
        self._watch: SilenceWatch[_Instance] = SilenceWatch(SUSPECT_AFTER_S, time.monotonic())
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, at: inference_pb2.TokensAt, request: feed_pb2.AttachRequest, wake: Callable[[], None]) -> DirectRead:
        """Start to read an answer at the instance `at`. request: without reader_id. wake: called on every change."""
        read = DirectRead((request.request_id, request.term.session), wake)
        if self._avoided.get(at.address, time.monotonic()):
            read.ended = True
            return read
        instance = self._instances.get(at.address) or self._open(at.address)
        request.reader_id = instance.reader_id
        self._start(self._request(instance, at.incarnation, request, read), f"direct read at {at.address}")
        return read

    def leave(self, read: DirectRead) -> None:
        read.ended = True
        for instance in self._instances.values():
            instance.drop(read)

    async def close(self) -> None:
        channels = [instance.channel for instance in self._instances.values()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._instances.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

    def _open(self, address: str) -> _Instance:
        instance = self._instances[address] = _Instance(address, open_channel(address, self._tls))
        self._start(self._follow(instance), f"answers of {address}")
        if self._watching is None or self._watching.done():
            self._watching = self._start(self._watch_silence(), "silence of decode instances")
        return instance

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"kaveri-client {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Mark the exception as retrieved.
            task.exception()

    async def _request(
        self, instance: _Instance, incarnation: int, request: feed_pb2.AttachRequest, read: DirectRead
    ) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                found = await asyncio.shield(instance.opened)
        except (TimeoutError, asyncio.CancelledError):
            self._avoid(instance)
            read.end()
            return
        if found != incarnation or read.ended:
            read.end()
            return
        read.requested = True
        instance.reads[read.key] = read
        try:
            await instance.stub.Attach(request, timeout=CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            # An instance that refuses has sent nothing.
            read.end(failed=not is_answer(error))
            instance.drop(read)

    def _avoid(self, instance: _Instance) -> None:
        self._avoided.put(instance.address, True, time.monotonic())

    async def _follow(self, instance: _Instance) -> None:
        """Receive an instance's stream until it ends. The instance's next answer opens another stream."""
        try:
            async for message in instance.call:
                self._watch.heard(instance)
                if not instance.opened.done():
                    instance.opened.set_result(message.incarnation)
                for part in message.parts:
                    self._take(instance, part)
        except aio.AioRpcError:
            self._avoid(instance)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        finally:
            self._end(instance)
        await instance.channel.close()

    def _take(self, instance: _Instance, part: feed_pb2.AnswerPart) -> None:
        read = instance.reads.get((part.request_id, part.session))
        if read is None:
            return
        read.put(part.response)
        if part.ended:
            instance.drop(read)
            read.end()
        elif read.unread_bytes > MAX_UNREAD_BYTES:
            # Only routers detect slow clients, so the rest comes from the router.
            instance.drop(read)
            read.end(failed=True)
        else:
            read.wake()

    async def _watch_silence(self) -> None:
        """Close silent and idle streams, until none is open."""
        while self._instances:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            for instance in self._watch.tick(now_s):
                self._avoid(instance)
                self._end(instance)
            for instance in tuple(self._instances.values()):
                if instance.opened.done() and not instance.reads and now_s - instance.idle_since_s > _IDLE_S:
                    self._end(instance)

    def _end(self, instance: _Instance) -> None:
        self._watch.forget(instance)
        if self._instances.get(instance.address) is instance:
            del self._instances[instance.address]
        instance.opened.cancel()
        reads, instance.reads = instance.reads, {}
        for read in reads.values():
            read.end(failed=True)
        instance.call.cancel()
