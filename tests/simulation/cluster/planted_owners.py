"""Planted bugs of who has a request, and who had it: see planted.py."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kaveri.client.sessions import Sessions
from kaveri.cluster.memory_store import MemoryStore
from kaveri.domain.owner import Ownership
from kaveri.domain.sampling import SamplingParams
from kaveri.lives.request_values import Placed
from services.decode import owners as decode_owners
from services.decode.owners import RequestOwners
from services.prefill.role import PrefillRole
from services.router.accepted_request import AlreadyReceived
from services.router.requests import DirectReading, RequestEntry
from tests.simulation.cluster.planting import nothing, planted, replaced


@planted
def reports_not_repeated() -> Iterator[None]:
    """Prefill does not repeat on a new stream what it sent on one that broke."""
    with replaced(PrefillRole, "repeat", lambda _: lambda *_: []):
        yield


@planted
def direct_answers_offered_too_early() -> Iterator[None]:
    """A client reads at a decode instance that prefill may still replace by another one."""

    def make(original: Any) -> Any:
        def offer(self: Any, state: Any) -> Any:
            is_placed = isinstance(state, Placed) and state.next_index > state.attempt.first_index
            if is_placed and state.attempt.number > self.offered:
                return state.decode
            return original(self, state)

        return offer

    with replaced(DirectReading, "offer", make):
        yield


@planted
def former_owners_believed() -> Iterator[None]:
    """What a former owner says of a client's tokens is the client's error."""
    with replaced(AlreadyReceived, "excuses", lambda _: lambda *_: False):
        yield


@planted
def defaults_left_behind() -> Iterator[None]:
    """A client re-attaches without the sampling parameters that its first router has resolved."""

    def make(original: Any) -> Any:
        def take(self: Any, response: Any) -> None:
            response.ClearField("resolved_params")
            original(self, response)

        return take

    with replaced(Sessions, "_take", make):
        yield


@planted
def defaults_of_a_found_request_ignored() -> Iterator[None]:
    """A router that takes a request over keeps its own sampling defaults for the next attempt."""

    def make(original: Any) -> Any:
        def adopt(self: Any, resolved: Any) -> None:
            original(self, SamplingParams(max_tokens=resolved.max_tokens))

        return adopt

    with replaced(RequestEntry, "adopt", make):
        yield


@planted
def secrets_ignored() -> Iterator[None]:
    """Instances take two requests with one id for the same one, whatever their secrets and routers are."""
    with replaced(Ownership, "is_same_request", lambda _: lambda *_: True):
        yield


@planted
def placed_by_any() -> Iterator[None]:
    """Decode gives a request to a router that has heard of it from another prefill instance than placed it."""

    def make(original: Any) -> Any:
        return lambda self, attachment: original(self, replace(attachment, placed_by=""))

    with replaced(RequestOwners, "attach", make):
        yield


@planted
def tokens_of_a_client_not_compared() -> Iterator[None]:
    """Decode goes on for a client that has other tokens of the answer than were drawn there."""
    with replaced(decode_owners, "check_received", lambda _: nothing):
        yield


@planted
def streams_repeat_for_any_router() -> Iterator[None]:
    """Decode does not tell a router, on its new stream, that a request which it names is another router's."""

    def make(original: Any) -> Any:
        def repeat(self: Any, router_id: str, awaited: Iterable[Any]) -> list[Any]:
            unknown: list[Any] = []
            for named in awaited:
                request = self._find(named.request_id, time.monotonic())
                owner = Ownership(named.term, router_id) if request is None else request.ownership
                unknown += original(self, owner.router_id, [named._replace(term=owner.term)])
            return unknown

        return repeat

    with replaced(RequestOwners, "repeat", make):
        yield


@planted
def claims_of_others_closed() -> Iterator[None]:
    """A router that has ended a request closes the claim that a later session has at another router."""

    def make(original: Any) -> Any:
        async def close_requests(self: Any, claims: Any) -> bool:
            present = [self.cluster.request(claim.request_id) for claim in claims]
            return bool(await original(self, [claim for claim in present if claim is not None]))

        return close_requests

    with replaced(MemoryStore, "close_requests", make):
        yield
