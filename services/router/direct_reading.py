"""A request whose client may read its answer at decode instances itself. No I/O.

The router follows such a request as any other. It tells the client once per attempt where the answer is drawn, and
keeps tokens back as long as the decode instance says that the client reads there. While it does, the client may have
tokens that the router lacks. So an attempt that is lost is not placed again here, unless the instance has moved the
request: other tokens could be drawn in the place of those. The client re-attaches with what it has.
"""

from services.router.lifecycle_values import Decoding, InstanceLife, State

_LEAST_LEFT = 8
"""An answer with fewer tokens to come is not worth a call to the decode instance."""


class DirectReading:
    """Of one session of one request."""

    def __init__(self) -> None:
        self._offered = 0
        """The last attempt of which the client was told where it decodes."""
        self._read = 0
        """The attempt that the client reads at its decode instance; 0: none."""

    def offer(self, state: State) -> InstanceLife | None:
        """The decode instance that the client is to be told of now: it has sent a token, so prefill will not place the
        attempt at another one. None: none that the client does not know of."""
        if not isinstance(state, Decoding):
            return None
        is_worth_it = state.attempt.most_tokens - state.next_index >= _LEAST_LEFT
        return state.decode if is_worth_it and state.attempt.number > self._offered else None

    def note_offered(self, attempt: int) -> None:
        """Notes that the client knows where this attempt decodes. It may then have tokens that the router lacks."""
        self._offered = attempt

    def note_read(self, attempt: int, is_read: bool) -> None:
        """The decode instance of an attempt says whether the client reads there."""
        if is_read:
            self._read = attempt
        elif self._read == attempt:
            self._read = 0

    def is_read(self, attempt: int) -> bool:
        """Whether the client gets this attempt's tokens from its decode instance."""
        return self._read == attempt

    def may_be_ahead(self, attempt: int) -> bool:
        """Whether the client may have tokens of this attempt that the router lacks."""
        return self._offered == attempt
