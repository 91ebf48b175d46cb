"""Requests that were cancelled while no router had them, between two sessions. No clock, no I/O."""

from collections import OrderedDict

_REMEMBERED_S = 60.0
"""Longer than any client waits before it re-attaches."""
_MOST_REMEMBERED = 8192


class CancelledIds:
    """Remembers for a while which ones. Another request with the same id has another secret."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[tuple[str, str], float] = OrderedDict()

    def add(self, request_id: str, secret_hash: str, now_s: float) -> None:
        """now_s: of a clock that never goes back."""
        self._until_s.pop((request_id, secret_hash), None)
        self._until_s[request_id, secret_hash] = now_s + _REMEMBERED_S
        while len(self._until_s) > _MOST_REMEMBERED or next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)

    def has(self, request_id: str, secret_hash: str, now_s: float) -> bool:
        """Whether a later session of the request is to end at once."""
        return self._until_s.get((request_id, secret_hash), now_s) > now_s
