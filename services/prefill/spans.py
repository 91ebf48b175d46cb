"""Tracing spans of a request at prefill, derived from the actions of its state machine."""

from kaveri.lives import prompt
from kaveri.telemetry.tracing import Spans


class PrefillSpans:
    """Tracing spans of one request at prefill: `prefill.queue`, `prefill.chunk` for each chunk, `prefill` for all of
    them, `prefill.place` for each search for room at decode, `kv.push`."""

    def __init__(self, spans: Spans, arrived_s: float) -> None:
        """arrived_s: time.monotonic() of the request's arrival."""
        self.spans = spans
        self._chunk_began_s = arrived_s
        self._search_began_s = arrived_s

    def note(self, action: prompt.Action, now_s: float) -> None:
        """Write the spans that end with an action of the request's state machine. now_s: time.monotonic()."""
        write = self.spans.write
        match action:
            case prompt.SendReport(prompt.Started(queue_s)):
                write("prefill.queue", now_s - queue_s, now_s)
                self._chunk_began_s = now_s
            case prompt.Advance(computed_tokens, new_tokens):
                write("prefill.chunk", self._chunk_began_s, now_s, tokens=new_tokens, computed_tokens=computed_tokens)
                self._chunk_began_s = now_s
            case prompt.SendReport(prompt.FirstTokenDrawn() as drawn):
                write("prefill", now_s - drawn.prefill_s, now_s)
            case prompt.FindPlace() | prompt.FindAnotherPlace():
                self._search_began_s = now_s
            case prompt.SendReport(prompt.RoomReserved(decode_instance_id)):
                write("prefill.place", self._search_began_s, now_s, decode_instance_id=decode_instance_id)
            case prompt.SendReport(prompt.HandedOver(kv_transport=transport) as moved) if (
                transport != prompt.NO_TRANSPORT
            ):
                began_s = now_s - moved.kv_transfer_s
                write("kv.push", began_s, now_s, bytes=moved.kv_bytes, transport=transport)
            case prompt.RecordEnd(outcome, error, seconds):
                write("prefill.request", now_s - seconds, now_s, error, outcome=outcome.value)
