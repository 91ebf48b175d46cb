"""The routers that a client knows, and which of them it asks next. Pure."""

import random
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from kaveri.addresses import is_address
from kaveri.client.request import check_name
from kaveri.errors import InvalidArgument

MAX_TARGETS = 64
"""Routers that a client knows, the caller's own and those that it has learned of."""
_MIN_REST_S = 0.05
_MAX_REST_S = 1.0
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:")
"""gRPC's own names, which are passed on as they are."""


def check_targets(target: object) -> tuple[str, ...]:
    """The addresses that the caller gave. Raises InvalidArgument, naming the field `target`."""
    if isinstance(target, str):
        return (_checked(target),)
    unordered = isinstance(target, bytes | bytearray | Mapping | AbstractSet)
    if unordered or not isinstance(target, Iterable):
        raise InvalidArgument("target", target, 'a router\'s "host:port", or a sequence of them')
    given = tuple(_checked(each) for each in target)
    if not given:
        raise InvalidArgument("target", given, "at least one router")
    if len(given) > MAX_TARGETS:
        raise InvalidArgument("target", f"{len(given)} routers", f"at most {MAX_TARGETS} routers")
    for number, each in enumerate(given):
        if each in given[:number]:
            raise InvalidArgument("target", each, "given once")
    return given


def _checked(target: str) -> str:
    address = check_name("target", target)
    if not is_address(address) and not address.startswith(_SCHEMES):
        raise InvalidArgument("target", address, 'a router\'s "host:port", an IPv6 host in brackets')
    return address


class Targets:
    """New requests go to the caller's own targets in turn. Targets that have failed rest for a while, longer each time;
    learned ones are asked when all of the caller's own rest."""

    def __init__(self, given: tuple[str, ...], rng: random.Random) -> None:
        self._known: dict[str, None] = dict.fromkeys(given)
        self._given = given
        self._rests: dict[str, tuple[float, float]] = {}
        """Of those that have failed: when the rest ends, and how long it was."""
        self._rng = rng
        # Not always the first: clients with the same list spread over its routers.
        self._turn = rng.randrange(len(given))

    @property
    def known(self) -> tuple[str, ...]:
        """The caller's own, in their order, then those learned."""
        return tuple(self._known)

    def learn(self, addresses: Iterable[str]) -> None:
        """Takes in what a router says of the cluster's routers. What is no address, or too much, is left out."""
        for address in addresses:
            if len(self._known) >= MAX_TARGETS:
                return
            if is_address(address):
                self._known[address] = None

    def replace(self, given: tuple[str, ...]) -> None:
        """New requests go to these from now on. Those learned, and the former ones, stay known behind them."""
        self._given = given
        self._known = dict.fromkeys((*given, *self._known)[:MAX_TARGETS])
        self._rests = {target: rest for target, rest in self._rests.items() if target in self._known}

    def choose(self, now_s: float) -> tuple[str, float]:
        """The target to ask next, and the seconds to wait before: 0 while one is known that does not rest."""
        turn = self._turn % len(self._given)
        self._turn += 1
        order = (*self._given[turn:], *self._given[:turn], *self._known)
        for target in order:
            if self._rest_end_s(target) <= now_s:
                return target, 0.0
        target = min(order, key=self._rest_end_s)
        return target, self._rest_end_s(target) - now_s

    def failed(self, target: str, now_s: float) -> None:
        """It could not be reached, or refuses requests: it rests."""
        _, former_s = self._rests.get(target, (0.0, 0.0))
        rest_s = min(_MAX_REST_S, max(_MIN_REST_S, 2 * former_s))
        self._rests[target] = now_s + rest_s * (0.5 + 0.5 * self._rng.random()), rest_s

    def worked(self, target: str, now_s: float) -> None:
        """It has answered: its rest ends. The next one is short again unless it fails soon."""
        if target not in self._rests:
            return
        end_s, rest_s = self._rests[target]
        if now_s - end_s > _MAX_REST_S:
            del self._rests[target]
        else:
            # One that takes a request, answers once and fails, again and again, is asked ever more slowly.
            self._rests[target] = min(end_s, now_s), rest_s

    def _rest_end_s(self, target: str) -> float:
        return self._rests.get(target, (0.0, 0.0))[0]
