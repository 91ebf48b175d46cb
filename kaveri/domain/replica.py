"""Copy of a request's KV cache at another instance: offer, location, resumption. Pure values."""

from dataclasses import dataclass

from kaveri.domain.length import TokenRange
from kaveri.domain.owner import OwnedRequest
from kaveri.domain.sampling import ResolvedParams
from kaveri.kv.layout.layout import KvLayout


@dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """Location of a request's KV copy, as known by the instance that decodes the request (the owner)."""

    holder_id: str
    """Id of the instance that holds it. Empty: the request has no copy any more."""
    holder_incarnation: int
    token_count: int
    """Length of the verified prefix, in tokens from the first one of the prompt on."""


@dataclass(frozen=True, slots=True)
class ReplicaOffer(OwnedRequest):
    """Call by the instance that decodes a request (the owner) to keep a copy of its KV at another instance."""

    owner_id: str
    """Id of the instance that owns the request."""
    owner_incarnation: int
    layout: KvLayout
    """The owner's layout; must equal the holder's."""
    token_count: int
    """Current tokens of the request. The copy may grow beyond them."""
    timeout_s: float
    """Time left until the request's deadline."""
    number: int = 0
    """Serial number of the copy among the owner's, from 1 on. 0: not counted."""

    def comes_before(self, other: "ReplicaOffer") -> bool:
        """Return True if `other` is a later offer of the same owner instance in the same incarnation."""
        is_from_same = (self.owner_id, self.owner_incarnation) == (other.owner_id, other.owner_incarnation)
        return is_from_same and 0 < self.number < other.number


@dataclass(frozen=True, slots=True)
class Resumption(OwnedRequest):
    """Call to the instance that holds a request's KV copy (the holder) to resume the request, whose own instance is
    lost or has released it."""

    token_ids: tuple[int, ...]
    """Prompt, followed by the tokens that its router has."""
    generated_count: int
    """Number of generated tokens in token_ids: the index of the next one."""
    params: ResolvedParams
    timeout_s: float
    """Time left until the request's deadline."""
    predicted_length: TokenRange | None
    holder_incarnation: int
    """Incarnation of the holder that the copy was pushed to."""
    replica_tokens: int = 0
    """Tokens in the copy, according to the owner. 0: unknown."""
    traceparent: str = ""
    """Parent span of the holder's spans. Empty: the request is not traced."""
    suspect_until: int = 0
    """Answer length up to which the request is a suspect; see kaveri.engine.contract.EngineRequest."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Response of an instance that has resumed a request from its KV copy."""

    incarnation: int
    held_tokens: int
    """Tokens whose KV came from the copy; the rest is recomputed."""
