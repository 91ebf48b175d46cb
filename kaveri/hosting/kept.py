"""Ended requests, kept for a while: a client may re-attach because it lost the last response."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from kaveri.domain.sampling import Logprobs

MAX_COUNT = 8192
MAX_BYTES = 64 << 20
_TOKEN_BYTES = 40
"""Memory of a token id in a list; this and the following are conservative estimates."""
_LOGPROB_BYTES = 160
_REQUEST_BYTES = 2048

ItemT = TypeVar("ItemT")


class _Entry(NamedTuple, Generic[ItemT]):
    item: ItemT
    until_s: float
    size: int


class KeptItems(Generic[ItemT]):
    """Items by request id, with limits on count and size; the oldest are evicted first."""

    def __init__(self, kept_s: float, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES) -> None:
        """kept_s: time to live after the last add() of the same id; 0: keep nothing."""
        self._kept_s = kept_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, _Entry[ItemT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ItemT]:
        return (entry.item for entry in self._entries.values())

    def add(self, request_id: str, item: ItemT, size: int, now_s: float) -> None:
        """Store the item, replacing one of the same id. size: in bytes."""
        self.forget(request_id)
        if not self._kept_s or size > self._max_bytes:
            return
        self._entries[request_id] = _Entry(item, now_s + self._kept_s, size)
        self._bytes += size
        while len(self._entries) > self._max_count or self._bytes > self._max_bytes:
            self.forget(next(iter(self._entries)))

    def get(self, request_id: str, now_s: float) -> ItemT | None:
        """Return the item; None if it has expired or is unknown."""
        self.prune(now_s)
        entry = self._entries.get(request_id)
        return entry.item if entry is not None else None

    def prune(self, now_s: float) -> None:
        """Remove expired items."""
        while self._entries:
            request_id, entry = next(iter(self._entries.items()))
            if entry.until_s > now_s:
                return
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Remove an item; no-op for unknown ids."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._bytes -= entry.size


def kept_bytes(token_count: int, logprobs: list[Logprobs]) -> int:
    """Memory of a request's tokens and log-probabilities, in bytes."""
    return _REQUEST_BYTES + _TOKEN_BYTES * token_count + _LOGPROB_BYTES * sum(1 + len(each.top) for each in logprobs)
