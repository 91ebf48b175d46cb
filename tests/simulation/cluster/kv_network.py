"""KV transfers over the simulated network: connections that share links, cuts and deaths with the RPCs.

Messages are passed as they are: they are frozen, and the engine's own transfers read them (kv_wire.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.cluster.kv_wire import DAMAGED, KvEnd, KvLink, KvMessage, WriteBlocks
from tests.simulation.cluster.loop import SimulatedProcess, current_process
from tests.simulation.cluster.network import Network, Pipe

_CONNECT_TIMEOUT_S = 2.0
_CLIENT, _SERVER = 0, 1
"""The sides of a connection."""


@dataclass(eq=False, slots=True)
class _NetworkListener:
    process: SimulatedProcess
    accept: Callable[[KvLink], KvEnd]
    connections: "dict[_KvConnection, None]" = field(default_factory=dict)


class NetworkWire:
    """The KvWire of one process."""

    def __init__(self, network: Network) -> None:
        """Belongs to the process that runs."""
        self._network = network
        self._process = current_process()

    def listen(self, accept: Callable[[KvLink], KvEnd]) -> str:
        address = f"{self._process.name}:kv{self._network.new_port()}"
        self._network.listeners[address] = _NetworkListener(self._process, accept)
        return address

    def connect(self, address: str, end: KvEnd) -> KvLink:
        network, client = self._network, self._process
        listener = network.listeners.get(address)
        link = _Link()
        if listener is None or listener.process.dead:
            delay_s = 2 * network.draw_delay_s(network.link(client.name, address.partition(":")[0]))
            network.loop.schedule(client, delay_s, end.lost, "connection refused")
            return link
        connection = _KvConnection(network, client, listener, link, end)
        link.bind(connection, _CLIENT)
        # A connection that is not answered in time is given up: its link is cut, or the process is frozen.
        network.loop.schedule(client, _CONNECT_TIMEOUT_S, connection.expect_answer)
        connection.up.send(connection.accepted)
        return link

    def stop_listening(self, address: str) -> None:
        listener = self._network.listeners.pop(address, None)
        if isinstance(listener, _NetworkListener):
            for connection in list(listener.connections):
                connection.close(_SERVER)


class _Link:
    """One end's KvLink."""

    def __init__(self) -> None:
        self._connection: _KvConnection | None = None
        self._side = _CLIENT

    def bind(self, connection: "_KvConnection", side: int) -> None:
        """Says which end of which connection it is."""
        self._connection = connection
        self._side = side

    def send(self, message: KvMessage) -> None:
        if self._connection is not None:
            self._connection.send(self._side, message)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close(self._side)


class _KvConnection:
    """A Breakable that carries KV. Its ends may be in one process: a holder pushes to its own engine."""

    def __init__(
        self, network: Network, client: SimulatedProcess, listener: _NetworkListener, link: _Link, end: KvEnd
    ) -> None:
        self.network = network
        self.client = client
        self.server = listener.process
        self._listener = listener
        self._client_link = link
        self._ends: dict[int, KvEnd] = {_CLIENT: end}
        """By side: those that have not heard that the connection is lost, and have not closed it."""
        self._answered = False
        self._refused = False
        """The connection broke before it had arrived."""
        self.up = Pipe(network, client, self.server)
        self.down = Pipe(network, self.server, client)
        network.connections[self] = None

    def accepted(self) -> None:
        """In the listener's process: the connection stands."""
        if self._refused:
            return
        link = _Link()
        link.bind(self, _SERVER)
        self._ends[_SERVER] = self._listener.accept(link)
        self._listener.connections[self] = None
        self.down.send(self._answer)

    def expect_answer(self) -> None:
        """In the client's process: it has waited long enough."""
        if not self._answered:
            self._lost(_CLIENT, "connection timed out")
            self.up.send(self._lost, _SERVER, "connection reset by peer")

    def send(self, side: int, message: KvMessage) -> None:
        """Carries a message of that end to the other one."""
        if side in self._ends:
            pipe = self._pipe(side)
            if isinstance(message, WriteBlocks) and self.network.damages(pipe.source.name, pipe.target.name):
                message = _damaged(message)
            kind = type(message).__name__
            self.network.trace.note("kv", kind, repr(message).encode(), lambda: self._pipe(side).target)
            self._pipe(side).send(self._receive, _other(side), message)

    def close(self, side: int) -> None:
        """That end wants no more."""
        if self._ends.pop(side, None) is not None:
            self._forget()
            self._pipe(side).send(self._lost, _other(side), "the other end closed the connection")

    def break_off(self, reason: str) -> None:
        self.network.trace.note("break", f"{self.client} {self.server} kv {reason}")
        for side in (_CLIENT, _SERVER):
            self._lose(side, reason)

    def lose_end(self, of: SimulatedProcess, reason: str) -> None:
        for side in self._sides(of):
            self._lose(side, reason)

    def peer_ended(self, of: SimulatedProcess) -> None:
        for side in self._sides(of):
            self._ends.pop(side, None)
            self._forget()
            self._pipe(side).send(self._lost, _other(side), "connection reset by peer")

    def _lose(self, side: int, reason: str) -> None:
        of, network = self._pipe(side).source, self.network
        network.loop.schedule(of, network.draw_delay_s(network.link(of.name, of.name)), self._lost, side, reason)

    def _answer(self) -> None:
        self._answered = True

    def _receive(self, side: int, message: KvMessage) -> None:
        end = self._ends.get(side)
        if end is not None:
            end.received(message)

    def _lost(self, side: int, reason: str) -> None:
        end = self._ends.pop(side, None)
        if end is not None:
            self._forget()
            end.lost(reason)
        elif side == _SERVER:
            self._refused = True

    def _forget(self) -> None:
        self.network.connections.pop(self, None)
        self._listener.connections.pop(self, None)

    def _pipe(self, side: int) -> Pipe:
        """What that end sends through."""
        return self.up if side == _CLIENT else self.down

    def _sides(self, of: SimulatedProcess) -> list[int]:
        return [side for side in (_CLIENT, _SERVER) if self._pipe(side).source is of]


def _damaged(message: WriteBlocks) -> WriteBlocks:
    (block_id, block), *others = message.blocks
    return WriteBlocks(((block_id, block._replace(chain=DAMAGED)), *others))


def _other(side: int) -> int:
    return _SERVER if side == _CLIENT else _CLIENT
