"""Ownership of a request: the order of its sessions and attempts. Pure: no clock, no I/O."""

from dataclasses import dataclass
from hmac import compare_digest
from typing import NamedTuple

from kaveri.errors import RequestAlreadyExists, StaleAttempt


class Term(NamedTuple):
    """Session and attempt of a request's owner; the greater pair is newer. Sessions count a client's connections to its
    request, attempts its router's tries. Unlike the message of this name it has no placement: that orders no owners."""

    session: int
    attempt: int

    def stale(self, request_id: str, newest: "Term") -> StaleAttempt | RequestAlreadyExists:
        """Return the error for this term when `newest` is known. StaleAttempt: its router may try a greater attempt.
        RequestAlreadyExists: a newer session has taken the request."""
        if self.session < newest.session:
            return RequestAlreadyExists(request_id)
        return StaleAttempt(request_id, self.attempt, newest.attempt)


class Ownership(NamedTuple):
    """Owner of a request: its term, and the secret or router that identifies the request beside its id."""

    term: Term
    router_id: str
    """Id of the router that gets the answer."""
    secret: bytes = b""
    """The client's secret. Empty: the request belongs to its router."""

    def is_same_request(self, other: "Ownership") -> bool:
        """Return True if both mean the same request; False if two requests have the same id."""
        if self.secret or other.secret:
            return compare_digest(self.secret, other.secret)
        return self.router_id == other.router_id

    def comparable(self, held: "Ownership") -> Term | None:
        """Return this session and attempt, comparable with those of `held` under the same request id; None if
        unrelated. Attempts of one router compare even if it reuses the id, since it continues their numbers."""
        if self.is_same_request(held):
            return self.term
        if self.router_id == held.router_id:
            return Term(held.term.session, self.term.attempt)
        return None


@dataclass(frozen=True, slots=True)
class OwnedRequest:
    """Base class of messages about a request: its id and its owner."""

    request_id: str
    ownership: Ownership
