"""A copy of a request's KV cache at another instance: who asks for it, where it is, who goes on. Pure values."""

from dataclasses import dataclass

from kaveri.domain.length import TokenRange
from kaveri.domain.owner import Ownership
from kaveri.domain.sampling import ResolvedParams
from kaveri.kv.layout.layout import KvLayout


@dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """Where a request's copy is, as its owner knows it."""

    holder_id: str
    """The instance that holds it. Empty: the request has no copy any more."""
    holder_incarnation: int
    token_count: int
    """Tokens, from the first one of the prompt on, whose KV the holder has verified."""


@dataclass(frozen=True, slots=True)
class ReplicaOffer:
    """What an owner says of a request whose copy another instance is to hold."""

    request_id: str
    ownership: Ownership
    owner_id: str
    """The instance that owns the request."""
    owner_incarnation: int
    layout: KvLayout
    """The owner's; it must be the holder's own."""
    token_count: int
    """Tokens of the request now. The copy may grow beyond them."""
    timeout_s: float
    """What is left until the request's deadline."""
    number: int = 0
    """Of the copy, among those that the owner has asked for, from 1 on. 0: not counted."""

    def comes_before(self, other: "ReplicaOffer") -> bool:
        """Whether the same life of an instance has made the other one later."""
        is_from_same = (self.owner_id, self.owner_incarnation) == (other.owner_id, other.owner_incarnation)
        return is_from_same and 0 < self.number < other.number


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a holder must know to go on with a request whose owner was lost."""

    request_id: str
    ownership: Ownership
    """Of the new owner."""
    token_ids: tuple[int, ...]
    """Prompt, followed by the tokens that its router has."""
    generated_count: int
    """How many of token_ids were generated: the index of the next one."""
    params: ResolvedParams
    timeout_s: float
    """What is left until the request's deadline."""
    predicted_length: TokenRange | None
    holder_incarnation: int
    """The life of the holder that the copy was pushed to."""
    replica_tokens: int = 0
    """Tokens that the copy has, as its owner has said. 0: not known."""
    traceparent: str = ""
    """Of the span that what happens at the holder is below. Empty: the request is not traced."""
    suspect_until: int = 0
    """The request is a suspect until its answer has so many tokens: see kaveri.engine.contract.EngineRequest."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request goes on at its holder."""

    incarnation: int
    held_tokens: int
    """Tokens whose KV came from the copy; the rest is computed again."""
