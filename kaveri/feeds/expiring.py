"""A map whose entries expire, with limits on their count and size. No clock, no I/O."""

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from kaveri.domain.sampling import Logprobs

MAX_COUNT = 8192
MAX_ANSWER_BYTES = 64 << 20
"""Limit for maps of ended answers, see answer_bytes()."""
_TOKEN_BYTES = 40
"""Memory of a token id in a list; this and the following are conservative estimates."""
_LOGPROB_BYTES = 160
_ANSWER_BYTES = 2048

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class _Entry(NamedTuple, Generic[ValueT]):
    value: ValueT
    until_s: float
    size: int


class ExpiringMap(Generic[KeyT, ValueT]):
    """Map whose entries expire ttl_s seconds after their last put(). Beyond a limit the oldest are evicted."""

    def __init__(self, ttl_s: float = math.inf, *, max_count: int = MAX_COUNT, max_bytes: float = math.inf) -> None:
        """ttl_s: 0 keeps nothing. max_bytes: limit on the sum of the sizes given to put()."""
        self._ttl_s = ttl_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[KeyT, _Entry[ValueT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: KeyT, value: ValueT, now_s: float = 0.0, size: int = 0) -> None:
        """Store the value as the newest, replacing the key's former one. now_s: time.monotonic(). size: in bytes."""
        self.pop(key)
        if self._ttl_s and size <= self._max_bytes:
            self._entries[key] = _Entry(value, now_s + self._ttl_s, size)
            self._bytes += size
        self.prune(now_s)

    def get(self, key: KeyT, now_s: float = 0.0) -> ValueT | None:
        """Return the value; None if it has expired or is unknown."""
        entry = self._entries.get(key)
        return entry.value if entry is not None and entry.until_s > now_s else None

    def pop(self, key: KeyT) -> ValueT | None:
        """Remove and return the value; None if it is unknown."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._bytes -= entry.size
        return entry.value

    def prune(self, now_s: float) -> None:
        """Remove expired values, and the oldest beyond the limits. now_s: time.monotonic()."""
        while self._entries:
            oldest, entry = next(iter(self._entries.items()))
            fits = len(self._entries) <= self._max_count and self._bytes <= self._max_bytes
            if fits and entry.until_s > now_s:
                return
            self.pop(oldest)

    def values(self) -> Iterable[ValueT]:
        """Return all values, oldest first, including any that have expired since the last prune()."""
        return [entry.value for entry in self._entries.values()]

    def keys(self) -> Iterable[KeyT]:
        """Return all keys, oldest first, including any that have expired since the last prune()."""
        return self._entries.keys()


def answer_bytes(token_count: int, logprobs: Iterable[Logprobs]) -> int:
    """Estimate the memory that the tokens and log-probabilities of an ended answer take, in bytes."""
    return _ANSWER_BYTES + _TOKEN_BYTES * token_count + _LOGPROB_BYTES * sum(1 + len(each.top) for each in logprobs)
