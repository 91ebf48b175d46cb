"""Channels of one client to its routers, calls over them, and the choice of another router after a failure."""

import asyncio
import os
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
from grpc import aio

from kaveri.client.api_key import key_metadata
from kaveri.client.targets import Targets
from kaveri.errors import DeadlineExceeded, KaveriError, RequestCancelled, Unavailable
from kaveri.rpc.liveness import Liveness
from kaveri.rpc.server import open_channel
from kaveri.rpc.tls import RpcTls
from kaveri.telemetry.tracing import HEADER
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import inference_pb2, inference_pb2_grpc
from kaveri.wire.status import error_of, is_answer

ResponseT = TypeVar("ResponseT")
_CLOSE_GRACE_S = 2.0
"""Time for responses that still arrive over the old connection of a router that is ending."""
_connected_in: set[int] = set()
"""Ids of the processes in which a client has connected: this one and its ancestors by fork."""


def is_forked() -> bool:
    return not _connected_in <= {os.getpid()}


def check_not_forked() -> None:
    """Raise RuntimeError if this process was forked after a client had connected: gRPC calls would never end."""
    if is_forked():
        raise RuntimeError(
            "this process was forked after a Kaveri client had connected, and gRPC does not work here: fork before the "
            "first call, or use multiprocessing's 'spawn'"
        )


class RouterFailed(Exception):
    """Failure of a router or its connection, or refusal by a draining router: another may serve the call."""

    def __init__(self, error: KaveriError, *, refused: bool = False, unheard: bool = False) -> None:
        """refused: the router itself refused the call. unheard: the client never received anything from the router,
        which may only be slow."""
        super().__init__(str(error))
        self.error = error
        self.refused = refused
        self.unheard = unheard


@dataclass(eq=False, slots=True)
class TriedRouters:
    """Routers that have failed one request. A router from which nothing was ever received counts only after its second
    failure: it may be slow."""

    may_be_taken: bool = False
    """True if a router that was reached may have accepted the request."""
    left: dict[str, None] = field(default_factory=dict)
    """Routers left after one failure without any response. They are not left for that reason again."""
    _failed: dict[str, None] = field(default_factory=dict)

    def add(self, target: str, failure: RouterFailed) -> None:
        """Record a failure of the router `target`."""
        (self.left if failure.unheard and target not in self.left else self._failed)[target] = None

    def next(self, chosen: str, known: Iterable[str]) -> str | None:
        """Return the router to try next: `chosen`, unless others have failed less; None if all have failed."""
        untried = [each for each in known if each not in self._failed]
        best = [each for each in untried if each not in self.left] or untried
        return chosen if chosen in best else next(iter(best), None)


class RouterCall(Generic[ResponseT]):
    """gRPC call to one router. Reads fail when the router sends nothing for too long."""

    def __init__(
        self, call: Any, target: str, targets: Targets, liveness: Liveness, was_connected: bool, leaves_unheard: bool
    ) -> None:
        self.target = target
        self._targets = targets
        self.leaves_unheard = leaves_unheard
        self._call = call
        self._liveness = liveness
        self._began_s = float("-inf") if was_connected else time.monotonic()
        self._arrived: asyncio.Queue[ResponseT | BaseException] = asyncio.Queue(1)
        """Next response, or the exception that ends the call or the wait."""
        self._reading: asyncio.Task[Any] | None = None
        """Reads one response ahead. A separate task, because gRPC cancels a call when the task that waits for it is
        cancelled."""
        self._ended: BaseException | None = None
        self._was_cancelled = False

    @property
    def can_fail_over(self) -> bool:
        return len(self._targets.known) > 1

    @property
    def was_reached(self) -> bool:
        """True if the router was connected when the call began, or has sent anything since."""
        return self._liveness.heard_s.get(self.target, float("-inf")) >= self._began_s

    async def read(self, *, is_stream: bool = True) -> ResponseT | None:
        """Return the next response of a stream, None at its end, or the response of a unary call. Raises RouterFailed,
        other KaveriErrors, and CancelledError if the waiting task or the call was cancelled. A call to a silent router
        stays open until cancel(); its later responses are dropped."""
        if self._reading is None:
            responses = iter(self._call.read, None) if is_stream else [self._call]
            self._reading = asyncio.create_task(self._read_ahead(responses), name="kaveri-client read")
        if self._ended is not None and self._arrived.empty():
            raise self._error(self._ended)
        self._liveness.begin(self)
        try:
            found = await self._arrived.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._liveness.end(self)
        if found is aio.EOF or found is self._ended:
            # The call has ended: wake other readers as well.
            self._arrived.put_nowait(found)
        if isinstance(found, BaseException):
            raise self._error(found)
        return None if found is aio.EOF else found

    def cancel(self) -> None:
        """Cancel the call, here and at the router. Idempotent."""
        self._was_cancelled = True
        self._call.cancel()
        if self._arrived.full() and self._reading is not None:
            # The reading task may be blocked on the full queue.
            self._reading.cancel()

    def suspect(self, after_s: float) -> None:
        if self._arrived.empty():
            silence = Unavailable(f"cannot reach {self.target}: it sent nothing for {after_s:g} s")
            self._arrived.put_nowait(RouterFailed(silence, unheard=self.target not in self._liveness.heard_s))

    async def _read_ahead(self, responses: Iterable[Awaitable[ResponseT]]) -> None:
        for response in responses:
            try:
                found = await response
                self._liveness.heard(self.target)
                await self._arrived.put(found)
            except (Exception, asyncio.CancelledError) as error:
                self._ended = error
                if not self._arrived.full():
                    self._arrived.put_nowait(error)
                return
            if found is aio.EOF:
                return

    def _error(self, raised: BaseException) -> BaseException:
        """Convert an exception of the gRPC call to the one that read() raises."""
        match raised:
            case aio.AioRpcError():
                error, answered = error_of(raised, peer=self.target), is_answer(raised)
                if isinstance(error, RequestCancelled) and not answered:
                    # A gRPC server that stops cancels its calls.
                    error = Unavailable(f"{self.target} cancelled the call")
                found: Exception = error
                if raised.code() is grpc.StatusCode.UNIMPLEMENTED:
                    # Another service may now listen on a former router's address.
                    found = RouterFailed(Unavailable(f"{self.target} is no router: {error}"), refused=True)
                elif _is_failure(error, answered=answered):
                    found = RouterFailed(error, refused=answered)
                found.__cause__ = raised
                return found
            case asyncio.CancelledError() if not self._was_cancelled:
                # Another call found the channel broken and closed it.
                return RouterFailed(Unavailable(f"the connection to {self.target} was closed"))
            case _:
                return raised


class Routers:
    """A client's channels to its routers, which connect on first use. Not thread-safe."""

    def __init__(self, targets: Targets, tls: RpcTls | None = None, api_key: str = "") -> None:
        """tls: None: the process's default. api_key: sent with every call; empty: none."""
        self.targets = targets
        self._tls = tls
        self._metadata = key_metadata(api_key)
        self._channels: dict[str, aio.Channel] = {}
        self._stubs: dict[str, inference_pb2_grpc.InferenceServiceAsyncStub] = {}
        self._closing: dict[asyncio.Task[None], None] = {}
        self._liveness = Liveness(
            lambda target: self._stub(target).Beat(
                inference_pb2.BeatRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata
            )
        )
        self._closed = False

    def call(
        self,
        method: str,
        request: Any,
        target: str,
        deadline_s: float | None,
        *,
        leaves_unheard: bool,
        traceparent: str = "",
    ) -> RouterCall[Any]:
        """Call a method of InferenceService. deadline_s: on the monotonic clock. leaves_unheard: fail the call if the
        router has never sent anything for SUSPECT_UNHEARD_AFTER_S, and others are known. traceparent: of the caller's
        span; empty: not traced. Raises DeadlineExceeded, and Unavailable once closed."""
        if self._closed:
            raise Unavailable("the client was closed")
        timeout_s = None if deadline_s is None else deadline_s - time.monotonic()
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineExceeded
        channel = self._channels.get(target)
        if channel is not None and channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            # It would connect again only after a pause, and Targets limits the attempts.
            del self._channels[target], self._stubs[target]
            closing = asyncio.create_task(channel.close(_CLOSE_GRACE_S), name="kaveri-client close")
            self._closing[closing] = None
            closing.add_done_callback(self._closing.pop)
        stub = self._stub(target)
        connected = self._channels[target].get_state() is grpc.ChannelConnectivity.READY
        metadata = (*(self._metadata or ()), (HEADER, traceparent)) if traceparent else self._metadata
        call = getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)
        return RouterCall(call, target, self.targets, self._liveness, connected, leaves_unheard)

    async def ask(self, method: str, request: Any, deadline_s: float | None) -> Any:
        """Call a unary method at one router after another until one responds; return its response. Raises KaveriErrors;
        if all routers fail, the last one's. deadline_s: on the monotonic clock; None: no limit."""
        tried = TriedRouters()
        while True:
            target = tried.next(self.targets.choose(time.monotonic())[0], self.targets.known)
            assert target is not None
            call = self.call(method, request, target, deadline_s, leaves_unheard=target not in tried.left)
            try:
                response = await call.read(is_stream=False)
            except RouterFailed as failure:
                call.cancel()
                self.targets.failed(target, time.monotonic())
                tried.add(target, failure)
                if tried.next(target, self.targets.known) is None:
                    raise failure.error from failure
            else:
                self.targets.worked(target, time.monotonic())
                return response

    async def close(self) -> None:
        self._closed = True
        self._liveness.close()
        channels, self._channels = self._channels, {}
        self._stubs.clear()
        await asyncio.gather(*(channel.close() for channel in channels.values()), *self._closing)

    def _stub(self, target: str) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        stub = self._stubs.get(target)
        if stub is None:
            channel = self._channels[target] = open_channel(target, self._tls)
            _connected_in.add(os.getpid())
            stub = self._stubs[target] = inference_pb2_grpc.InferenceServiceStub(channel)
        return stub


def _is_failure(error: KaveriError, *, answered: bool) -> bool:
    """Return True if another router may succeed. answered: True if a Kaveri service sent the error."""
    match error:
        case Unavailable(retry_after_s=0.0):
            # The router is draining.
            return True
        case Unavailable():
            return not answered
        case _:
            return False
