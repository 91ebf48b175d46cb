"""Tracks the routers known to a client, and chooses the next one. Pure."""

import random
from collections.abc import Iterable

from kaveri.addresses import is_address
from kaveri.client.request import check_text
from kaveri.domain.sampling import ordered_items
from kaveri.errors import InvalidArgument

MAX_TARGETS = 64
"""Max number of known routers, given and learned."""
_MIN_REST_S = 0.05
_MAX_REST_S = 1.0
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:")
"""Schemes of gRPC's own target names."""


def check_targets(target: object) -> tuple[str, ...]:
    """Validate a caller's router address or addresses. Raises InvalidArgument, naming the field `target`."""
    if isinstance(target, str):
        return (_checked(target),)
    given = tuple(map(_checked, ordered_items("target", target, 'a router\'s "host:port", or a sequence of them')))
    if not given:
        raise InvalidArgument("target", given, "at least one router")
    if len(given) > MAX_TARGETS:
        raise InvalidArgument("target", f"{len(given)} routers", f"at most {MAX_TARGETS} routers")
    for number, each in enumerate(given):
        if each in given[:number]:
            raise InvalidArgument("target", each, "given once")
    return given


def _checked(target: object) -> str:
    address = check_text("target", target)
    if not is_address(address) and not address.startswith(_SCHEMES):
        raise InvalidArgument("target", address, 'a router\'s "host:port", an IPv6 host in brackets')
    return address


class Targets:
    """Round-robin choice among router addresses: the given ones, or, while all of them are in backoff after failures,
    those learned from the cluster."""

    def __init__(self, given: tuple[str, ...], rng: random.Random) -> None:
        self._known: dict[str, None] = dict.fromkeys(given)
        self._given = given
        self._rests: dict[str, tuple[float, float]] = {}
        """End and duration of the backoff of each failed target."""
        self._rng = rng
        # Random, so that clients with the same list spread over its routers.
        self._turn = rng.randrange(len(given))

    @property
    def known(self) -> tuple[str, ...]:
        """Given addresses in order, then learned ones."""
        return tuple(self._known)

    def learn(self, addresses: Iterable[str]) -> None:
        """Add router addresses named by the cluster. Invalid ones and those beyond MAX_TARGETS are ignored."""
        for address in addresses:
            if len(self._known) >= MAX_TARGETS:
                return
            if is_address(address):
                self._known[address] = None

    def replace(self, given: tuple[str, ...]) -> None:
        """Replace the given addresses. All earlier ones stay known, after the new ones."""
        self._given = given
        self._known = dict.fromkeys((*given, *self._known)[:MAX_TARGETS])
        self._rests = {target: rest for target, rest in self._rests.items() if target in self._known}

    def choose(self, now_s: float) -> tuple[str, float]:
        """Return the next router, and the seconds to wait before using it: 0 unless all are in backoff."""
        turn = self._turn % len(self._given)
        self._turn += 1
        order = dict.fromkeys((*self._given[turn:], *self._given[:turn], *self._known))
        rest_ends_s = {target: self._rests.get(target, (0.0, 0.0))[0] for target in order}
        for target, end_s in rest_ends_s.items():
            if end_s <= now_s:
                return target, 0.0
        target = min(rest_ends_s, key=rest_ends_s.__getitem__)
        return target, rest_ends_s[target] - now_s

    def failed(self, target: str, now_s: float) -> None:
        """Start a backoff for a router that could not be reached or refused a request; doubles each time."""
        _, former_s = self._rests.get(target, (0.0, 0.0))
        rest_s = min(_MAX_REST_S, max(_MIN_REST_S, 2 * former_s))
        self._rests[target] = now_s + rest_s * (0.5 + 0.5 * self._rng.random()), rest_s

    def worked(self, target: str, now_s: float) -> None:
        """End the backoff of a router that has responded; the next one is short again unless it fails soon."""
        if target not in self._rests:
            return
        end_s, rest_s = self._rests[target]
        if now_s - end_s > _MAX_REST_S:
            del self._rests[target]
        else:
            # A target that alternately responds and fails rests longer each time.
            self._rests[target] = min(end_s, now_s), rest_s
