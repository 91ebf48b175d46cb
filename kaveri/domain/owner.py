"""Ownership of a request, and the order of successive owners. Pure: no clock, no I/O."""

from dataclasses import dataclass
from hmac import compare_digest
from typing import NamedTuple

from kaveri.errors import RequestAlreadyExists, StaleAttempt


class Owner(NamedTuple):
    """One placement of a request. Ordered as a pair: the client counts sessions, a router its attempts within one."""

    session: int
    attempt: int

    def stale(self, request_id: str, newest: "Owner") -> StaleAttempt | RequestAlreadyExists:
        """Error for this owner when a newer one is known. A router may try a greater attempt; an older session has lost
        the request."""
        if self.session < newest.session:
            return RequestAlreadyExists(request_id)
        return StaleAttempt(request_id, self.attempt, newest.attempt)


class Ownership(NamedTuple):
    """Identity and owner of a request in a message, beside the request's id."""

    owner: Owner
    router_id: str
    """Id of the router that gets the answer."""
    secret: bytes = b""
    """The client's secret. Empty: the request belongs to its router."""

    def is_same_request(self, other: "Ownership") -> bool:
        """Return True if both mean the same request, not two with the same id."""
        if self.secret or other.secret:
            return compare_digest(self.secret, other.secret)
        return self.router_id == other.router_id

    def comparable(self, held: "Ownership") -> Owner | None:
        """Return this owner in a form comparable with `held`'s, which has the same request id; None if the requests are
        unrelated. A router that reuses a request id continues its attempt numbers across sessions."""
        if self.is_same_request(held):
            return self.owner
        if self.router_id == held.router_id:
            return Owner(held.owner.session, self.owner.attempt)
        return None


@dataclass(frozen=True, slots=True)
class OwnedRequest:
    """A request and its owner."""

    request_id: str
    ownership: Ownership
