"""Reads answers at the decode instances that draw them, beside the router that has placed them.

One stream per instance carries the tokens of all answers that this client reads there. Nothing depends on it: an answer
that cannot be read here comes from the router, which sends what the client lacks.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine

from grpc import aio

from kaveri.domain.silence import SilenceWatch
from kaveri.rpc.server import open_channel
from kaveri.rpc.tls import RpcTls
from kaveri.timeouts import CALL_TIMEOUT_S, SUSPECT_AFTER_S, TICK_S
from kaveri.v1 import decode_pb2, inference_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.wire.status import is_answer

REST_S = 10.0
"""An instance that could not be reached, went silent or broke off its stream is left alone for so long."""
_MOST_RESTING = 1024
MOST_WAITING_BYTES = 1 << 20
"""Of one answer that the caller does not take. With more the rest is not read here."""
_PIECE_BYTES = 256
"""What a piece takes in memory beside its content, about."""
IDLE_S = 30.0
"""A stream without answers is ended after this time."""


class DirectRead:
    """One answer as it is read at one instance, in one session. Its pieces may repeat what the caller has."""

    def __init__(self, key: tuple[str, int], wake: Callable[[], None]) -> None:
        """key: request id and session. wake: called when something has changed."""
        self.key = key
        self._pieces: deque[inference_pb2.GenerateResponse] = deque()
        self.waiting_bytes = 0
        """Of pieces that the caller has not taken."""
        self.asked = False
        """Whether the instance may send the answer here."""
        self.broken = False
        """Whether it was asked, and cannot be heard any more: the router may still keep tokens back."""
        self.ended = False
        """Whether nothing comes any more. The router goes on."""
        self.wake = wake

    def put(self, piece: inference_pb2.GenerateResponse) -> None:
        """Adds the next piece for the caller. It is copied: a part of a message keeps the whole message in memory."""
        own = inference_pb2.GenerateResponse()
        own.CopyFrom(piece)
        self._pieces.append(own)
        self.waiting_bytes += _size(own)

    def take(self) -> inference_pb2.GenerateResponse | None:
        """The next piece. None: there is none."""
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        self.waiting_bytes -= _size(piece)
        return piece

    def end(self) -> None:
        """Nothing comes any more."""
        if not self.ended:
            self.ended = True
            self.wake()

    def lose(self) -> None:
        """The stream is lost, or the instance does not answer."""
        self.broken = self.asked and not self.ended
        self.end()


class _Instance:
    """The stream of one decode instance."""

    def __init__(self, address: str, channel: aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.stub = DecodeServiceStub(channel)
        self.reader_id = secrets.token_hex(16)
        self.reads: dict[tuple[str, int], DirectRead] = {}
        self.opened: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The instance's life, once its stream stands. Cancelled when it cannot be reached."""
        self.idle_since_s = time.monotonic()
        self.call: aio.Call | None = None
        self.task: asyncio.Task[None] | None = None


class DirectStreams:
    """All of one client. For one event loop."""

    def __init__(self, tls: RpcTls | None = None) -> None:
        """tls: None: what the process uses."""
        self._tls = tls
        self._instances: dict[str, _Instance] = {}
        self._rests: dict[str, float] = {}
        """Until when instances that could not be reached are left alone, by address."""
        self._watch: SilenceWatch[_Instance] = SilenceWatch(SUSPECT_AFTER_S, time.monotonic())
        self._watching: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}

    def read(
        self, at: inference_pb2.TokensAt, request: decode_pb2.ReadAnswerRequest, wake: Callable[[], None]
    ) -> DirectRead:
        """Begins to read an answer. request: without its reader. wake: called when something has changed."""
        read = DirectRead((request.request_id, request.session), wake)
        if self._rests.get(at.address, 0.0) > time.monotonic():
            read.ended = True
            return read
        instance = self._instances.get(at.address) or self._open(at.address)
        request.reader_id = instance.reader_id
        self._start(self._ask(instance, at.incarnation, request, read), f"direct read at {at.address}")
        return read

    def leave(self, read: DirectRead) -> None:
        """The caller does not take it any more. Idempotent."""
        read.ended = True
        for instance in self._instances.values():
            if instance.reads.get(read.key) is read:
                self._drop(instance, read)

    async def close(self) -> None:
        """Ends all streams; what is read there is not read any more."""
        tasks, channels = [*self._tasks], [instance.channel for instance in self._instances.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._instances.clear()
        await asyncio.gather(*(channel.close() for channel in channels))

    def _open(self, address: str) -> _Instance:
        instance = self._instances[address] = _Instance(address, open_channel(address, self._tls))
        instance.task = self._start(self._follow(instance), f"answers of {address}")
        if self._watching is None or self._watching.done():
            self._watching = self._start(self._watch_silence(), "silence of decode instances")
        return instance

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"kaveri-client {name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.exception()

    async def _ask(
        self, instance: _Instance, incarnation: int, request: decode_pb2.ReadAnswerRequest, read: DirectRead
    ) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                life = await asyncio.shield(instance.opened)
        except (TimeoutError, asyncio.CancelledError):
            self._rest(instance.address)
            read.end()
            return
        if life != incarnation or read.ended:
            read.end()
            return
        read.asked = True
        instance.reads[read.key] = read
        try:
            await instance.stub.ReadAnswer(request, timeout=CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            if is_answer(error):
                # It has not begun.
                read.end()
            else:
                read.lose()
            self._drop(instance, read)

    def _rest(self, address: str) -> None:
        now_s = time.monotonic()
        if len(self._rests) >= _MOST_RESTING:
            self._rests.clear()
        self._rests[address] = now_s + REST_S

    def _drop(self, instance: _Instance, read: DirectRead) -> None:
        if instance.reads.get(read.key) is read:
            del instance.reads[read.key]
            if not instance.reads:
                instance.idle_since_s = time.monotonic()

    async def _follow(self, instance: _Instance) -> None:
        """Reads the stream of an instance until it ends; it is opened again for the next answer there."""
        call = instance.stub.StreamAnswers(decode_pb2.StreamAnswersRequest(reader_id=instance.reader_id))
        instance.call = call
        try:
            async for message in call:
                self._watch.heard(instance)
                if not instance.opened.done():
                    instance.opened.set_result(message.incarnation)
                for part in message.parts:
                    self._take(instance, part)
        except aio.AioRpcError:
            self._rest(instance.address)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        finally:
            self._lose(instance)
            call.cancel()
        await instance.channel.close()

    def _take(self, instance: _Instance, part: decode_pb2.AnswerPart) -> None:
        read = instance.reads.get((part.request_id, part.session))
        if read is None:
            return
        read.put(part.response)
        if part.ended:
            self._drop(instance, read)
            read.ended = True
        elif read.waiting_bytes > MOST_WAITING_BYTES:
            # Routers know when a client is too slow, so one of them sends the rest.
            self._drop(instance, read)
            read.lose()
        read.wake()

    def _lose(self, instance: _Instance) -> None:
        self._watch.forget(instance)
        if self._instances.get(instance.address) is instance:
            del self._instances[instance.address]
        instance.opened.cancel()
        reads, instance.reads = instance.reads, {}
        for read in reads.values():
            read.lose()

    async def _watch_silence(self) -> None:
        """Runs while there is a stream."""
        while self._instances:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            for instance in self._watch.tick(now_s):
                self._rest(instance.address)
                self._end(instance)
            for instance in tuple(self._instances.values()):
                if instance.opened.done() and not instance.reads and now_s - instance.idle_since_s > IDLE_S:
                    self._end(instance)

    def _end(self, instance: _Instance) -> None:
        self._lose(instance)
        if instance.call is not None:
            instance.call.cancel()


def _size(piece: inference_pb2.GenerateResponse) -> int:
    return _PIECE_BYTES + piece.ByteSize()
