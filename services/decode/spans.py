"""Tracing spans of a request on a decode instance, derived from the actions of its state machine."""

from kaveri.kv.transfer.ticket import Ticket
from kaveri.lives import decoding
from kaveri.telemetry.tracing import Spans

_FAILURES = (
    decoding.Outcome.DEADLINE,
    decoding.Outcome.REFUSED,
    decoding.Outcome.NOT_LANDED,
    decoding.Outcome.ROUTER_GONE,
    decoding.Outcome.FAILED,
)
"""Outcomes that fail a span. After other outcomes the answer is complete or continues elsewhere."""


class DecodeSpans:
    """Tracing spans of one request at decode: `decode.room` (wait for KV blocks), `decode.admission` (wait to join the
    batch), `kv.landing` (arrival of its KV), `decode`."""

    def __init__(self, spans: Spans, came_s: float) -> None:
        """came_s: time.monotonic() of the request's arrival."""
        self.spans = spans
        self._phase = "decode.room"
        self._since_s = came_s

    def adopted(self, now_s: float) -> None:
        """Start the `decode` span: the engine prefilled the request itself, so there is no wait for KV."""
        self._phase, self._since_s = "decode", now_s

    def note(self, action: decoding.Action, now_s: float) -> None:
        """Write the spans that end with an action of the request's state machine. now_s: time.monotonic()."""
        write = self.spans.write
        match action:
            case decoding.AnswerReserve(Ticket()):
                write("decode.room", self._since_s, now_s)
                self._phase, self._since_s = "kv.landing", now_s
            case decoding.CountLanding(kv_bytes, landing_s):
                write("kv.landing", now_s - landing_s, now_s, bytes=kv_bytes)
                self._phase, self._since_s = "decode", now_s
            case decoding.BareAction.COUNT_PREEMPTION:
                write("decode.preempted", now_s, now_s)
            case decoding.RecordEnd(times=None) as end:
                error = (end.reason or end.outcome.value) if end.outcome in _FAILURES else None
                write(self._phase, self._since_s, now_s, error, outcome=end.outcome.value)
            case decoding.RecordEnd(times=times) as end:
                assert times is not None
                began_s = now_s - times.decode_s
                write("decode.admission", began_s - times.queue_s, began_s)
                write("decode", began_s, now_s, outcome=end.outcome.value, preemptions=end.preemptions)
