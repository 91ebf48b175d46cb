"""gRPC over the simulated network: stands for RpcServer and open_channel under the generated stubs.

Every message is really serialised and parsed again. Calls end as gRPC's do: deadlines on both sides, cancellation
that travels, abort with trailing metadata, connections that are refused, time out or break. A reader that does not
read stops its writer after a window of bytes.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any

import grpc
from grpc import aio

from kaveri.errors import ConfigError
from kaveri.rpc.server import MAX_MESSAGE_BYTES
from tests.simulation.cluster.loop import SimulatedProcess, current_process
from tests.simulation.cluster.network import Network, Pipe

_WINDOW_BYTES = 64 * 2**10
"""Sent and not read: HTTP/2's window for one stream."""
_CONNECT_TIMEOUT_S = 2.0
_SENT_AGAIN_AFTER_S = 1.0
_BACKOFF_MIN_S = 0.05
_BACKOFF_MAX_S = 1.0
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class SimulatedServer:
    """Stands for kaveri.rpc.server.RpcServer, and for the aio.Server that servicers are added to."""

    def __init__(self, network: Network, host: str, port: int, service_names: Sequence[str]) -> None:
        self._network = network
        self._host = host
        self._asked_port = port
        self.process = current_process()
        self.methods: dict[str, Any] = {}
        self.calls: dict[_ServerCall, None] = {}
        self.connections: dict[_Connection, None] = {}
        self.listening = False
        self.port = 0
        self._empty = asyncio.Event()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{self._host}:{self.port}"

    def add(self, register: Callable[[Any], None]) -> None:
        """See RpcServer.add."""
        register(self)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """What generated code calls beside add_registered_method_handlers()."""

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        """What generated code calls."""
        for name, handler in methods.items():
            self.methods[f"/{service}/{name}"] = handler

    async def start(self) -> None:
        """See RpcServer.start."""
        self.port = self._asked_port or self._network.new_port()
        if self.address in self._network.listeners:
            raise ConfigError("--port", f"cannot listen on {self.address}: Address already in use")
        self._network.listeners[self.address] = self
        self.listening = True

    async def ready(self) -> None:
        """See RpcServer.ready. A simulated server is not asked for its health."""

    async def drain(self) -> None:
        """See RpcServer.drain."""

    async def stop(self, grace_s: float) -> None:
        """See RpcServer.stop."""
        if not self.listening:
            return
        self.listening = False
        self._network.listeners.pop(self.address, None)
        for connection in list(self.connections):
            connection.go_away()
        if self.calls and grace_s > 0:
            self._empty.clear()
            try:
                async with asyncio.timeout(grace_s):
                    await self._empty.wait()
            except TimeoutError:
                pass
        # As it comes: clients of a gRPC server that stops read the one or the other.
        code = self._network.rng.choice((_UNAVAILABLE, grpc.StatusCode.CANCELLED))
        tasks = []
        for call in list(self.calls):
            call.end(code, "the server stops", ())
            if call.task is not None and not call.task.done():
                call.task.cancel()
                tasks.append(call.task)
        if tasks:
            await asyncio.wait(tasks)

    def call_ended(self, call: "_ServerCall") -> None:
        """Takes it off the list."""
        if self.calls.pop(call, call) is None and not self.calls:
            self._empty.set()


class _Connection:
    """One HTTP/2 connection of one channel."""

    def __init__(self, channel: "SimulatedChannel", server: SimulatedServer, network: Network) -> None:
        self.channel = channel
        self.client = channel.process
        self.listener = server
        self.server = server.process
        self.network = network
        self.up = Pipe(network, self.client, self.server)
        self.down = Pipe(network, self.server, self.client)
        self.client_calls: dict[_ClientCall, None] = {}
        self.server_calls: dict[_ServerCall, None] = {}
        self._lost: dict[SimulatedProcess, None] = {}
        self.server_lost = False
        """Whether the server's end has heard that the connection is lost."""
        network.connections[self] = None
        server.connections[self] = None

    def go_away(self) -> None:
        """The server takes no more calls on it; those under way go on."""
        self.listener.connections.pop(self, None)
        self.down.send(self.channel.went_away, self)

    def break_off(self, reason: str) -> None:
        self.network.trace.note("break", f"{self.client} {self.server} {reason}")
        for end in (self.client, self.server):
            self.lose_end(end, reason)

    def lose_end(self, of: SimulatedProcess, reason: str) -> None:
        if of in self._lost:
            return
        self._lost[of] = None
        if len(self._lost) == 2:
            self._forget()
        lose = self.lose_client if of is self.client else self.lose_server
        self.network.loop.schedule(of, self.network.draw_delay_s(self.network.link(of.name, of.name)), lose, reason)

    def peer_ended(self, of: SimulatedProcess) -> None:
        """The machine of a dead process resets the connection, behind all that the process had sent."""
        self._lost[of] = None
        self._forget()
        if of is self.client:
            self.up.send(self.lose_server, "connection reset by peer")
        else:
            self.down.send(self.lose_client, "connection reset by peer")

    def close(self) -> None:
        """The client closes its channel."""
        self._lost[self.client] = None
        self.up.send(self.lose_server, "connection closed")
        self._forget()

    def lose_client(self, reason: str) -> None:
        """The client's end hears that it is over."""
        self.channel.lost(self)
        for call in list(self.client_calls):
            call.fail(_UNAVAILABLE, reason)

    def lose_server(self, reason: str) -> None:
        """The server's end hears that it is over."""
        self.server_lost = True
        self.listener.connections.pop(self, None)
        for call in list(self.server_calls):
            call.cancel()

    def _forget(self) -> None:
        self.network.connections.pop(self, None)


class SimulatedChannel:
    """Stands for a grpc.aio channel to one address: connects when first used, and again when a connection is lost.

    Calls wait for the first connection. After a failed one they fail at once, until the next attempt succeeds; the
    attempts follow one another with gRPC's back-off.
    """

    def __init__(self, network: Network, address: str) -> None:
        self.network = network
        self.address = address
        self.process = current_process()
        self._connection: _Connection | None = None
        self._connecting = False
        self._attempt = 0
        self._failure = ""
        """Why the last attempt failed; empty: calls wait for the attempt under way."""
        self._backoff_s = _BACKOFF_MIN_S
        self._waiting: dict[_ClientCall, None] = {}
        self._closed = False

    def get_state(self) -> grpc.ChannelConnectivity:
        """Whether it is connected; of the other states only that they are others."""
        connected = self._connection is not None
        return grpc.ChannelConnectivity.READY if connected else grpc.ChannelConnectivity.CONNECTING

    def unary_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> Callable[..., "_ClientCall"]:
        """What generated stubs call."""
        return self._method(path, request_serializer, response_deserializer)

    unary_stream = unary_unary

    def _method(self, path: str, serialize: Any, deserialize: Any) -> Callable[..., "_ClientCall"]:
        def call(request: Any, timeout: float | None = None, **_: object) -> _ClientCall:
            return _ClientCall(self, path, serialize(request), deserialize, timeout)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Cancels what is under way and disconnects."""
        self._closed = True
        self._attempt += 1
        connection, self._connection = self._connection, None
        for call in (*self._waiting, *(connection.client_calls if connection is not None else ())):
            call.cancel()
        self._waiting.clear()
        if connection is not None:
            connection.close()

    async def __aenter__(self) -> "SimulatedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- for calls ----

    def begin(self, call: "_ClientCall") -> None:
        """Sends the call, or lets it wait for a connection, or fails it."""
        loop = self.network.loop
        if self._closed:
            raise aio.UsageError("Channel is closed.")
        if self._connection is not None:
            call.send_on(self._connection)
        elif self._failure:
            loop.call_soon(call.fail, _UNAVAILABLE, self._failure)
        else:
            self._waiting[call] = None
            if not self._connecting:
                self._connect()

    def forget(self, call: "_ClientCall") -> None:
        """It does not wait any more."""
        self._waiting.pop(call, None)

    # ---- connecting ----

    def _connect(self) -> None:
        self._connecting = True
        self._attempt += 1
        loop, number = self.network.loop, self._attempt
        loop.call_later(
            _CONNECT_TIMEOUT_S, self._failed, number, "connection attempt timed out before receiving SETTINGS frame"
        )
        self._send_handshake(loop.world, self.process.name, self._host, self._knock, number)

    @property
    def _host(self) -> str:
        return self.address.partition(":")[0]

    def _send_handshake(
        self, to: SimulatedProcess, source: str, target: str, callback: Callable[..., object], number: int, *args: Any
    ) -> None:
        """Over a cut link it is sent again, as TCP does, while the attempt lasts."""
        loop, link = self.network.loop, self.network.link(source, target)
        if number != self._attempt:
            return
        if link.cut_since_s is None:
            loop.schedule(to, self.network.draw_delay_s(link), callback, number, *args)
        else:
            again = (to, source, target, callback, number, *args)
            loop.schedule(loop.world, _SENT_AGAIN_AFTER_S, self._send_handshake, *again)

    def _knock(self, number: int) -> None:
        """At the server's machine."""
        server: SimulatedServer | None = self.network.listeners.get(self.address)
        if server is None:
            self._answer(
                self._host,
                self._failed,
                number,
                "Failed to connect to remote host: connect: Connection refused (111)",
            )
        else:
            # The process itself has to answer: not while it is frozen.
            self.network.loop.schedule(server.process, 0.0, self._accepted, number, server)

    def _accepted(self, number: int, server: SimulatedServer) -> None:
        """In the server's process."""
        if server.listening:
            self._answer(server.process.name, self._connected, number, server)

    def _answer(self, host: str, callback: Callable[..., object], number: int, *args: Any) -> None:
        self._send_handshake(self.process, host, self.process.name, callback, number, *args)

    def _connected(self, number: int, server: SimulatedServer) -> None:
        if number != self._attempt or self._connection is not None or self._closed or not self._connecting:
            return
        self._connecting = False
        self._failure = ""
        self._backoff_s = _BACKOFF_MIN_S
        if server.process.dead or not server.listening:
            self._connecting = True
            self._failed(number, "connection reset by peer")
            return
        self._connection = _Connection(self, server, self.network)
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call.send_on(self._connection)

    def _failed(self, number: int, reason: str) -> None:
        if number != self._attempt or not self._connecting or self._closed:
            return
        self._connecting = False
        # gRPC's own words.
        self._failure = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:{self.address}: {reason}"
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call.fail(_UNAVAILABLE, self._failure)
        self.network.loop.call_later(self._backoff_s * (0.8 + 0.4 * self.network.rng.random()), self._try_again)
        self._backoff_s = min(_BACKOFF_MAX_S, self._backoff_s * 1.6)

    def _try_again(self) -> None:
        if not self._closed and self._connection is None and not self._connecting:
            self._connect()

    def went_away(self, connection: _Connection) -> None:
        """The server takes no more calls on that connection."""
        if self._connection is connection:
            self._connection = None

    lost = went_away


def open_simulated_channel(network: Network, address: str) -> SimulatedChannel:
    """Stands for kaveri.rpc.server.open_channel."""
    return SimulatedChannel(network, address)


class _ClientCall:
    """The client's end of an RPC: what a generated stub's method returns."""

    def __init__(
        self, channel: SimulatedChannel, path: str, request: bytes, deserialize: Any, timeout_s: float | None
    ) -> None:
        self._channel = channel
        self._network = channel.network
        self.path = path
        self._request = request
        self._deserialize = deserialize
        loop = self._network.loop
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._code: grpc.StatusCode | None = None
        self._error: aio.AioRpcError | None = None
        self._cancelled = False
        self._consumed_bytes = 0
        self._connection: _Connection | None = None
        self._server_call: _ServerCall | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._is_iterated: bool | None = None
        """Whether its messages are read by iteration, and not by read(). None: none was read."""
        self.deadline_s = None if timeout_s is None else loop.time() + timeout_s
        self._timer = None
        if timeout_s is not None:
            self._timer = loop.call_later(
                max(0.0, timeout_s), self.fail, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
            )
        if len(request) > MAX_MESSAGE_BYTES:
            loop.call_soon(self.fail, grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max")
        else:
            channel.begin(self)

    # ---- what services use ----

    def __await__(self) -> Generator[Any, None, Any]:
        return self._one().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._all()

    async def read(self) -> Any:
        """The next message; aio.EOF at the end. Raises AioRpcError, and CancelledError once cancelled here."""
        return await self._read(is_iterated=False)

    async def _read(self, *, is_iterated: bool) -> Any:
        if self._is_iterated not in (None, is_iterated):
            raise RuntimeError("The iterator and read/write APIs may not be mixed on a single RPC.")
        self._is_iterated = is_iterated
        while not self._messages and self._code is None:
            self._waiter = self._network.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._waiter = None
        if self._cancelled:
            raise asyncio.CancelledError
        if self._messages:
            data = self._messages.popleft()
            self._consumed(len(data))
            if self._connection is not None:
                self._network.answered_by[asyncio.current_task()] = self._connection.server
            return self._deserialize(data)
        if self._error is not None:
            raise self._error
        return aio.EOF

    def cancel(self) -> bool:
        """Ends the call here and tells the server."""
        if self._code is not None:
            return False
        self._cancelled = True
        self._end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())
        self._tell_server()
        return True

    def cancelled(self) -> bool:
        """Whether it ended with CANCELLED."""
        return self._code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        """Whether it has ended."""
        return self._code is not None and not self._messages

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls it when the RPC has ended."""
        if self._code is not None:
            callback(self)
        else:
            self._callbacks.append(callback)

    def time_remaining(self) -> float | None:
        """Seconds until the deadline."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - self._network.loop.time())

    async def _one(self) -> Any:
        message = await self.read()
        if message is aio.EOF:
            raise aio.AioRpcError(grpc.StatusCode.INTERNAL, aio.Metadata(), aio.Metadata(), "no response")
        return message

    async def _all(self) -> AsyncIterator[Any]:
        while (message := await self._read(is_iterated=True)) is not aio.EOF:
            yield message

    # ---- the network ----

    def send_on(self, connection: _Connection) -> None:
        """Sends the request."""
        if self._code is not None:
            return
        self._connection = connection
        connection.client_calls[self] = None
        call = self._server_call = _ServerCall(connection, self)
        network = self._network
        network.trace.note("call", self.path, self._request, lambda: f"-> {connection.server}")
        connection.up.send(call.start, self._request, self.time_remaining())

    def take(self, data: bytes) -> None:
        """A message has arrived."""
        if self._code is None:
            self._messages.append(data)
            self._network.trace.note(
                "message", self.path, data, lambda: str(self._deserialize(data)).replace("\n", " ")
            )
            self._wake()

    def take_status(self, code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, Any]]) -> None:
        """The server has ended the call."""
        if self._code is None:
            self._end(code, details, metadata)

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """The call ends for a reason found here; what was not read is lost."""
        if self._code is None:
            self._messages.clear()
            self._end(code, details, ())
            self._tell_server()

    def _consumed(self, size: int) -> None:
        self._consumed_bytes += size
        if self._consumed_bytes >= _WINDOW_BYTES // 2 and self._connection is not None and self._code is None:
            self._connection.up.send(self._server_call.widen, self._consumed_bytes)  # type: ignore[union-attr]
            self._consumed_bytes = 0

    def _tell_server(self) -> None:
        if self._connection is not None and self._server_call is not None:
            self._connection.up.send(self._server_call.cancel)

    def _end(self, code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, Any]]) -> None:
        self._code = code
        self._network.trace.note("status", f"{self.path} {code.name} {details}")
        if self._timer is not None:
            self._timer.cancel()
        if code is not grpc.StatusCode.OK:
            self._error = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*metadata), details)
        self._channel.forget(self)
        if self._connection is not None:
            self._connection.client_calls.pop(self, None)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _ServerCall:
    """The server's end of an RPC, and the context that its handler is given."""

    def __init__(self, connection: _Connection, client_call: _ClientCall) -> None:
        self._connection = connection
        self._client_call = client_call
        self._network = connection.network
        self._handler: Any = None
        self.path = client_call.path
        self.task: asyncio.Task[None] | None = None
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._window = _WINDOW_BYTES
        self._wider: asyncio.Event | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._abort_error: BaseException | None = None

    @property
    def process(self) -> SimulatedProcess:
        """Whose it is."""
        return self._connection.server

    def start(self, data: bytes, timeout_s: float | None) -> None:
        """The request has arrived."""
        if self._ended or self._connection.server_lost:
            return
        server, loop = self._connection.listener, self._network.loop
        self._handler = server.methods.get(self.path)
        if not server.listening or self._handler is None:
            code = grpc.StatusCode.UNIMPLEMENTED if server.listening else _UNAVAILABLE
            self._ended = True
            self._connection.down.send(self._client_call.take_status, code, "not served here", ())
            return
        server.calls[self] = None
        self._network.open_calls[self] = None
        self._connection.server_calls[self] = None
        if timeout_s is not None:
            self._deadline_s = loop.time() + timeout_s
            self._timer = loop.call_later(timeout_s, self.cancel)
        request = self._handler.request_deserializer(data)
        self._network.trace.note("start", self.path, b"", lambda: str(request).replace("\n", " "))
        self.task = loop.create_task(self._serve(request))
        self.task.add_done_callback(self._served)

    def widen(self, size: int) -> None:
        """The client has read so many bytes."""
        self._window += size
        if self._wider is not None:
            self._wider.set()

    def cancel(self) -> None:
        """The client has gone, or the deadline has passed."""
        if self._ended:
            return
        self._close()
        if self.task is not None and not self.task.done():
            self.task.cancel()

    def end(self, code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, Any]]) -> None:
        """Sends the status."""
        if self._ended:
            return
        self._close()
        self._connection.down.send(self._client_call.take_status, code, details, tuple(metadata))

    # ---- grpc.aio.ServicerContext ----

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._network.loop.time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls it when the handler has ended, however."""
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Whether the client has gone."""
        return self._ended

    def peer(self) -> str:
        """The client, in gRPC's form."""
        return f"ipv4:{self._connection.client.name}:0"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """None is sent."""
        return ()

    async def send_initial_metadata(self, metadata: Sequence[Any]) -> None:
        """Not needed: a simulated client waits for messages alone."""

    async def write(self, message: Any) -> None:
        """Sends a message; waits while the client reads too slowly."""
        data = self._handler.response_serializer(message)
        if len(data) > MAX_MESSAGE_BYTES:
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max", ())
            raise asyncio.CancelledError
        if self._window <= 0:
            self._wider = asyncio.Event()
            while self._window <= 0:
                self._wider.clear()
                await self._wider.wait()
            self._wider = None
        if not self._ended:
            self._window -= len(data)
            self._connection.down.send(self._client_call.take, data)
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[Any] = ()) -> None:
        """Ends the RPC with a status; always raises."""
        self.end(code, details, trailing_metadata)
        self._abort_error = aio.AbortError("Locally aborted.")
        raise self._abort_error

    async def _serve(self, request: Any) -> None:
        handler = self._handler
        try:
            if handler.unary_unary is not None:
                await self.write(await handler.unary_unary(request, self))
            elif inspect.isasyncgenfunction(handler.unary_stream):
                async for message in handler.unary_stream(request, self):
                    await self.write(message)
            else:
                await handler.unary_stream(request, self)
        except aio.AbortError:
            assert self._abort_error is not None
        except Exception as error:
            self._network.loop.unhandled.append(f"{self.process}: {self.path} raised {error!r}")
            self.end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}", ())
        else:
            self.end(grpc.StatusCode.OK, "", ())

    def _served(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            # Cancelled by something else than the client: gRPC says so to the client.
            self.end(grpc.StatusCode.CANCELLED, "cancelled", ())
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
        self._connection.listener.call_ended(self)
        self._network.open_calls.pop(self, None)

    def _close(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._connection.server_calls.pop(self, None)
