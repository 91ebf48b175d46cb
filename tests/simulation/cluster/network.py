"""Links between simulated processes: delay, order, cuts, and what a dead or frozen machine does to connections.

What runs over it: RPCs (rpc.py), KV (kv_network.py) and the store's commands (store.py). Bytes are sent as messages
through pipes. A pipe keeps their order, as TCP does; a cut link holds them until it is whole again.
"""

import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tests.simulation.cluster.loop import SimulatedLoop, SimulatedProcess
from tests.simulation.cluster.trace import Trace

KEEPALIVE_S = 15.0
"""A connection whose link is cut, or whose peer is frozen, for so long counts as broken: see kaveri.rpc.server."""
_BEHIND_S = 1e-7
"""Between two messages of one pipe that would otherwise arrive at once."""


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """How slow links are when nothing is wrong with them."""

    delay_s: float = 0.0002
    jitter_s: float = 0.0005
    """Most that a message is later than that."""


class NetworkLink:
    """One direction between two names. It outlives the processes at its ends."""

    __slots__ = ("cut_since_s", "extra_s", "held", "source", "target")

    def __init__(self, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self.cut_since_s: float | None = None
        self.extra_s = 0.0
        """Added to every message's delay: a slow link."""
        self.held: list[tuple[Pipe, Callable[..., object], tuple[Any, ...]]] = []


class Pipe:
    """Messages from one process to another, in order."""

    __slots__ = ("_last_at_s", "_link", "_network", "source", "target")

    def __init__(self, network: "Network", source: SimulatedProcess, target: SimulatedProcess) -> None:
        self._network = network
        self._link = network.link(source.name, target.name)
        self.source = source
        self.target = target
        self._last_at_s = 0.0

    def send(self, callback: Callable[..., object], *args: Any) -> None:
        """Calls callback(*args) in the target when the message arrives there; never, if the target is dead by then."""
        if self._link.cut_since_s is not None:
            self._link.held.append((self, callback, args))
        else:
            self.carry(callback, args)

    def carry(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        """send() once the link is whole."""
        network = self._network
        delay_s, now_s = network.draw_delay_s(self._link), network.loop.now
        if now_s + delay_s <= self._last_at_s:
            delay_s = self._last_at_s + _BEHIND_S - now_s
        self._last_at_s = now_s + delay_s
        network.loop.schedule(self.target, delay_s, callback, *args)


class Breakable(Protocol):
    """A connection between two processes."""

    client: SimulatedProcess
    server: SimulatedProcess

    def break_off(self, reason: str) -> None:
        """Both ends hear, each at its own time, that the connection is lost. Idempotent."""

    def lose_end(self, of: SimulatedProcess, reason: str) -> None:
        """Only the end of that process hears it: its peer may be out of reach."""

    def peer_ended(self, of: SimulatedProcess) -> None:
        """That process is dead: its machine tells the other end, behind what it had sent."""


class Network:
    """All links of one simulation, and the connections over them."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random, trace: Trace, quality: LinkQuality) -> None:
        self.loop = loop
        self.rng = rng
        self.trace = trace
        self._quality = quality
        self._links: dict[tuple[str, str], NetworkLink] = {}
        self._to_damage: set[tuple[str, str]] = set()
        """Source and target of links whose next block of KV arrives damaged."""
        self.connections: dict[Breakable, None] = {}
        """Those that stand, in the order in which they were made."""
        self.listeners: dict[str, Any] = {}
        """Servers by address."""
        self.answered_by: weakref.WeakKeyDictionary[Any, SimulatedProcess] = weakref.WeakKeyDictionary()
        """Who sent the message that a task read last."""
        self.open_calls: dict[Any, None] = {}
        """RPCs that a server has not ended."""
        self._ports = itertools.count(1)
        self.stand_ins: dict[str, Any] = {}

    def new_port(self) -> int:
        """A port that is not in use."""
        return next(self._ports)

    def link(self, source: str, target: str) -> NetworkLink:
        """The link from one name to another."""
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = NetworkLink(source, target)
        return link

    def draw_delay_s(self, link: NetworkLink) -> float:
        """How long the next message over the link takes."""
        quality = self._quality
        return quality.delay_s + quality.jitter_s * self.rng.random() + link.extra_s

    def damage(self, source: str, target: str) -> None:
        """The next block of KV that is sent that way arrives damaged."""
        self._to_damage.add((source, target))

    def has_to_damage(self, source: str, target: str) -> bool:
        """Whether no block has been sent since."""
        return (source, target) in self._to_damage

    def damages(self, source: str, target: str) -> bool:
        """Whether this block is the one. Those behind it are not."""
        is_due = self.has_to_damage(source, target)
        self._to_damage.discard((source, target))
        return is_due

    def cut(self, source: str, target: str) -> None:
        """From now on nothing arrives that way until heal(). Connections over it break after KEEPALIVE_S."""
        link = self.link(source, target)
        if link.cut_since_s is None:
            link.cut_since_s = self.loop.now
            self.loop.schedule(self.loop.world, KEEPALIVE_S, self._still_cut, link, link.cut_since_s)

    def heal(self, source: str, target: str) -> None:
        """Ends cut(): what was sent meanwhile arrives."""
        link = self.link(source, target)
        link.cut_since_s = None
        held, link.held = link.held, []
        for pipe, callback, args in held:
            pipe.carry(callback, args)

    def heal_all(self) -> None:
        """Every link is whole, and as fast as the others."""
        for link in self._links.values():
            self.heal(link.source, link.target)
            link.extra_s = 0.0

    def freeze(self, process: SimulatedProcess) -> None:
        """The process stands still; its peers find out after KEEPALIVE_S."""
        self.loop.freeze(process)
        self.loop.schedule(self.loop.world, KEEPALIVE_S, self._still_frozen, process)

    def end_process(self, process: SimulatedProcess) -> None:
        """The process is dead or has ended: nothing of it listens, and its machine closes its connections."""
        self.loop.kill(process)
        for address in [a for a, server in self.listeners.items() if server.process is process]:
            del self.listeners[address]
        for connection in [c for c in self.connections if process in (c.client, c.server)]:
            connection.peer_ended(process)

    def _still_cut(self, link: NetworkLink, since_s: float) -> None:
        if link.cut_since_s != since_s:
            return
        ends = {link.source, link.target}
        for connection in [c for c in self.connections if {c.client.name, c.server.name} == ends]:
            for end in (connection.client, connection.server):
                connection.lose_end(end, "keep-alive timeout")

    def _still_frozen(self, process: SimulatedProcess) -> None:
        if not process.frozen or process.dead:
            return
        for connection in [c for c in self.connections if process in (c.client, c.server)]:
            peer = connection.server if connection.client is process else connection.client
            connection.lose_end(peer, "keep-alive timeout")
            # The peer closes its socket: the frozen process reads that when it goes on.
            connection.lose_end(process, "connection reset by peer")
