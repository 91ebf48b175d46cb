"""Numbers the attempts of requests. No two attempts that are spoken of at the same time have one name."""

from collections import OrderedDict

_REMEMBERED_S = 60.0
"""After a request's end: much longer than a token or an Abort of it can be on its way."""
_REMEMBERED_COUNT = 65_536


class AttemptNumbers:
    """The last attempt of each request id. A client may use an id again at once: its attempts then go on counting, so
    that a late token, or a late Abort, of the former request does not touch the new one."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def last(self, request_id: str) -> int:
        """The number of the last attempt; 0 when none is remembered."""
        return self._last.get(request_id, (0, 0.0))[0]

    def note(self, request_id: str, number: int, now_s: float) -> None:
        """Remembers the number for a while."""
        self._last[request_id] = number, now_s + _REMEMBERED_S
        self._last.move_to_end(request_id)
        while self._last:
            oldest, (_, until_s) = next(iter(self._last.items()))
            if until_s > now_s and len(self._last) <= _REMEMBERED_COUNT:
                break
            del self._last[oldest]
