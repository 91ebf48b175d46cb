"""Who owns a request, and in which order owners follow one another. Pure: no clock, no I/O."""

from hmac import compare_digest
from typing import NamedTuple

from kaveri.errors import RequestAlreadyExists, StaleAttempt


class Owner(NamedTuple):
    """One placement of a request. Compared as a pair: the client counts sessions, a router its attempts within one."""

    session: int
    attempt: int

    def stale(self, request_id: str, newest: "Owner") -> StaleAttempt | RequestAlreadyExists:
        """The error for this owner when a newer one is known. A router may try a greater attempt; an older session has
        lost the request."""
        if self.session < newest.session:
            return RequestAlreadyExists(request_id)
        return StaleAttempt(request_id, self.attempt, newest.attempt)


class Ownership(NamedTuple):
    """What a message says of the request that it means, beside the request's id."""

    owner: Owner
    router_id: str
    """Of the router that gets the answer."""
    secret: bytes = b""
    """The client's. Empty: the request belongs to its router."""

    def is_same_request(self, other: "Ownership") -> bool:
        """Whether both mean one request, and not two with the same id."""
        if self.secret or other.secret:
            return compare_digest(self.secret, other.secret)
        return self.router_id == other.router_id

    def comparable(self, held: "Ownership") -> Owner | None:
        """This owner, to be compared with the one of `held`, which has the same request id. None: they have nothing to
        do with each other. A router that uses a request id again counts its attempts on, whatever the session."""
        if self.is_same_request(held):
            return self.owner
        if self.router_id == held.router_id:
            return Owner(held.owner.session, self.owner.attempt)
        return None
