"""The spans of one request at its router."""

from kaveri.telemetry.tracing import OpenSpan


class RequestTrace:
    """`generate` for the request; below it `place` for each wait until an instance has it, and `attempt` for each
    attempt, which links to the one before. What instances write is below the attempt. Times are time.monotonic()'s."""

    def __init__(self, span: OpenSpan, accepted_s: float) -> None:
        """span: of the request; its owner ends it. accepted_s: when its input was checked."""
        self.spans = span
        self._waits_since_s = accepted_s
        self._attempt: OpenSpan | None = None
        """The one that is open."""
        self._former: OpenSpan | None = None

    @property
    def traceparent(self) -> str:
        """Of the present attempt, for the instances."""
        return self._attempt.traceparent if self._attempt is not None else ""

    def begin_attempt(self, number: int, now_s: float) -> None:
        """An attempt begins; one that is open has ended."""
        self.end_attempt(now_s)
        self.spans.write("place", self._waits_since_s, now_s)
        self._attempt = self.spans.begin("attempt", now_s, self._former, attempt=number)

    def end_attempt(self, now_s: float, error: object = None, **attributes: object) -> None:
        """The attempt that is open is over. error: why it was lost."""
        if self._attempt is not None:
            self._attempt.end(now_s, error, **attributes)
            self._former, self._attempt, self._waits_since_s = self._attempt, None, now_s
