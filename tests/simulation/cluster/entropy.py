"""What the services must not get from the real world while they are simulated: time, entropy, servers and channels.

Replaced for the length of a run, and put back afterwards, wherever a module of this project has bound the name. So no
service needs to know of it, and one that reads a clock or draws a number in yet another way is found by the check that
the same seed gives the same trace.
"""

import contextlib
import importlib
import os
import pkgutil
import random
import secrets
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import kaveri.rpc.server
from kaveri.wire.messages import id_drawn_from
from tests.simulation.cluster.loop import SimulatedLoop
from tests.simulation.cluster.network import Network
from tests.simulation.cluster.rpc import SimulatedServer, open_simulated_channel

_ROOMS = ("kaveri", "services")
_WALL_CLOCK_S = 1.8e9
"""What the wall clock shows at the simulation's time 0."""
_real_random = random.Random


class DrawnIds:
    """Stands for id_drawn_from: clients draw the ids that the plan has for their requests."""

    def __init__(self) -> None:
        self.next_id = ""
        """Of the request that a client sends now, if it draws the id."""
        self._by_secret: dict[bytes, str] = {}

    def id_drawn_from(self, secret: bytes) -> str:
        if self.next_id:
            self._by_secret[secret], self.next_id = self.next_id, ""
        return self._by_secret.get(secret, "")


@contextlib.contextmanager
def replaced_world(loop: SimulatedLoop, network: Network, rng: random.Random, drawn_ids: DrawnIds) -> Iterator[None]:
    """Within it the project's code sees the simulation's clock, entropy and network. rng: all entropy comes from it."""
    stand_ins = _stand_ins(loop, network, rng, drawn_ids)
    places = list(_places(stand_ins))
    state = random.getstate()
    random.seed(rng.getrandbits(64))
    for namespace, name, original in places:
        namespace[name] = stand_ins[id(original)][1]
    try:
        yield
    finally:
        for namespace, name, original in places:
            namespace[name] = original
        random.setstate(state)


def _stand_ins(
    loop: SimulatedLoop, network: Network, rng: random.Random, drawn_ids: DrawnIds
) -> dict[int, tuple[Any, Any]]:
    """By identity of the original: the original, and what stands for it."""

    def wall_clock() -> float:
        return _WALL_CLOCK_S + loop.time()

    class SeededRandom(_real_random):
        def __new__(cls, seed: Any = None) -> Any:
            return super().__new__(cls)

        def __init__(self, seed: Any = None) -> None:
            super().__init__(rng.getrandbits(64) if seed is None else seed)

    class Server(SimulatedServer):
        def __init__(self, *args: Any) -> None:
            super().__init__(network, *args)

    pairs = [
        (time.monotonic, loop.time),
        (time.perf_counter, loop.time),
        (time.monotonic_ns, lambda: int(loop.time() * 1e9)),
        (time.perf_counter_ns, lambda: int(loop.time() * 1e9)),
        (time.time, wall_clock),
        (time.time_ns, lambda: int(wall_clock() * 1e9)),
        (os.urandom, rng.randbytes),
        (secrets.randbits, rng.getrandbits),
        (secrets.randbelow, rng.randrange),
        (secrets.choice, rng.choice),
        (secrets.token_bytes, lambda size=32: rng.randbytes(size)),
        (secrets.token_hex, lambda size=32: rng.randbytes(size).hex()),
        (id_drawn_from, drawn_ids.id_drawn_from),
        (uuid.uuid4, lambda: uuid.UUID(int=rng.getrandbits(128), version=4)),
        (_real_random, SeededRandom),
        (kaveri.rpc.server.RpcServer, Server),
        (kaveri.rpc.server.open_channel, lambda address, tls=None: open_simulated_channel(network, address)),
    ]
    return {id(original): (original, stand_in) for original, stand_in in pairs}


_known_places: dict[frozenset[int], tuple[int, list[tuple[dict[str, Any], str, Any]]]] = {}


def _places(stand_ins: dict[int, tuple[Any, Any]]) -> list[tuple[dict[str, Any], str, Any]]:
    """(namespace, name, original) of every place where an original is bound: its own module, and this project's."""
    key, module_count = frozenset(stand_ins), len(sys.modules)
    known = _known_places.get(key)
    if known is not None and known[0] == module_count:
        return known[1]
    modules = [time, os, secrets, uuid, random]
    modules += [module for name, module in sys.modules.items() if name.partition(".")[0] in _ROOMS and module]
    found = []
    for module in modules:
        if module.__name__.startswith("tests.simulation.cluster"):
            continue
        for name, value in vars(module).items():
            original = stand_ins.get(id(value))
            if original is not None and original[0] is value:
                found.append((vars(module), name, value))
    _known_places[key] = (module_count, found)
    return found


def import_services() -> None:
    """Imports every module of the services that take part, so that none of them binds the real thing during a run."""
    for role in ("router", "prefill", "decode", "instance", "predictor"):
        package = importlib.import_module(f"services.{role}")
        for module in pkgutil.iter_modules(package.__path__):
            if module.name != "__main__":
                importlib.import_module(f"services.{role}.{module.name}")
