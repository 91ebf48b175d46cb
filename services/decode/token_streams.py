"""Carries tokens to routers: one stream per router, one batch per engine step; fewer and larger ones when it is slow.

Tokens are kept in their requests' logs (answer_log.py), sent or not. A stream knows only which of its requests have
something that it has not been sent, so a stream that breaks loses nothing.
"""

import asyncio
from collections.abc import Callable, Iterable

from kaveri.engine.contract import TokenStep
from services.decode.answer_log import End, GainedTokens
from services.decode.lifecycle import RequestTimes
from services.decode.requests import DecodeRequest

BEAT_S = 0.1
"""A stream without tokens sends an empty message this often: far less than the 0.5 s after which routers give it up."""


class TokenStream:
    """One router's subscription, and what waits for it. For one reader."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.unsent: dict[DecodeRequest, None] = {}
        """Ordered: the requests that have something for the router."""
        self.notices: list[GainedTokens] = []
        """What the router must know of requests that are not here for it."""
        self.closed = False
        self.changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and has sent everything."""
        return self.closed and not (self.unsent or self.notices)

    async def next_batch(self, beat_s: float = BEAT_S) -> list[GainedTokens]:
        """Takes all tokens that there are; waits for some for `beat_s` seconds at most."""
        if not (self.unsent or self.notices or self.closed):
            self.changed.clear()
            beat = asyncio.get_running_loop().call_later(beat_s, self.changed.set)
            try:
                await self.changed.wait()
            finally:
                beat.cancel()
        batch = [request.log.take(request.request_id, request.owner) for request in self.unsent]
        for request, gained in zip(self.unsent, batch, strict=True):
            gained.read_here = request.reader is not None
        self.unsent.clear()
        if self.notices:
            batch += self.notices
            self.notices = []
        return batch


class TokenStreams:
    """The streams of all routers. For one event loop."""

    def __init__(
        self,
        grace_s: float,
        router_gone: Callable[[str], None],
        requests_of: Callable[[str], Iterable[DecodeRequest]],
    ) -> None:
        """grace_s: how long a router without a stream may take to open one. router_gone: told when it has not.
        requests_of: the requests of a router, ended ones that are kept included."""
        self._grace_s = grace_s
        self._router_gone = router_gone
        self._requests_of = requests_of
        self._streams: dict[str, TokenStream] = {}
        # Of routers that requests are here for and that have no stream.
        self._grace: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    @property
    def missing_routers(self) -> tuple[str, ...]:
        """The routers without a stream that requests are, or were, here for: those requests are orphans."""
        return tuple(self._grace)

    @property
    def count(self) -> int:
        """Routers that have a stream."""
        return len(self._streams)

    def has(self, router_id: str) -> bool:
        """Whether the router has a stream."""
        return router_id in self._streams

    def open(self, router_id: str) -> TokenStream:
        """A stream for the router. An older one of the same router ends; what it has not sent goes here."""
        self._end_grace(router_id)
        former = self._streams.get(router_id)
        stream = self._streams[router_id] = TokenStream(router_id)
        if former is not None:
            former.unsent = {}
            former.notices, stream.notices = [], former.notices
            self._end(former)
        for request in self._requests_of(router_id):
            if request.log.has_unsent:
                stream.unsent[request] = None
        if self._closed:
            self._end(stream)
        return stream

    def close(self, stream: TokenStream) -> None:
        """The stream is broken or cancelled. Unless a newer one has replaced it, its router's grace begins."""
        if self._streams.get(stream.router_id) is stream:
            del self._streams[stream.router_id]
            self.expect(stream.router_id)

    def close_all(self) -> None:
        """Ends every stream once it has sent what it has, and those that come as well."""
        self._closed = True
        for stream in self._streams.values():
            self._end(stream)
        for router_id in self.missing_routers:
            self._end_grace(router_id)

    def expect(self, router_id: str) -> None:
        """Requests are here for the router; without a stream its grace begins, unless it did already."""
        if router_id not in self._streams and router_id not in self._grace and not self._closed:
            loop = asyncio.get_running_loop()
            self._grace[router_id] = loop.call_later(self._grace_s, self._grace_over, router_id)

    def gain(self, request: DecodeRequest, step: TokenStep, times: RequestTimes | None) -> None:
        """Adds one token; `times` with the last one."""
        request.log.gain(step, times)
        if request.reader is not None:
            request.reader.changed()
            if not request.log.is_due:
                return
        stream = self._streams.get(request.router_id)
        if stream is not None:
            stream.unsent[request] = None

    def announce(self, request: DecodeRequest) -> None:
        """Sends an entry without tokens: the request is here, and waits for a seat.

        A router that has given it up before it heard of its placement answers with an abort.
        """
        stream = self._streams.get(request.router_id)
        if stream is not None:
            stream.unsent[request] = None

    def fail(self, request: DecodeRequest, end: End) -> None:
        """Send the router the error that ends the request here, after its tokens. end: with an error."""
        request.log.end = end
        if request.reader is not None:
            request.reader.changed()
        self.send(request)

    def note_reader(self, request: DecodeRequest) -> None:
        """Sends the router what it lacks, and whether a caller reads the answer here."""
        if request.log.has_unsent or not request.log.has_ended:
            self.announce(request)
            self.flush()

    def notify(self, router_id: str, notice: GainedTokens) -> None:
        """Sends the router something that is not the request's next part. Dropped when it has no stream."""
        stream = self._streams.get(router_id)
        if stream is not None:
            stream.notices.append(notice)
            stream.changed.set()

    def drop(self, request: DecodeRequest) -> None:
        """Sends no more of the request to its router, nor to a caller that reads it here."""
        if request.reader is not None:
            request.reader.leave()
        stream = self._streams.get(request.router_id)
        if stream is not None:
            stream.unsent.pop(request, None)

    def send(self, request: DecodeRequest) -> None:
        """Sends what the request's log holds and was not sent. Its router may have changed."""
        stream = self._streams.get(request.router_id)
        if stream is None:
            self.expect(request.router_id)
        elif request.log.has_unsent:
            stream.unsent[request] = None
            stream.changed.set()

    def flush(self) -> None:
        """Wakes the streams that have something to send: once per batch of events."""
        for stream in self._streams.values():
            if stream.unsent:
                stream.changed.set()

    def _end(self, stream: TokenStream) -> None:
        stream.closed = True
        stream.changed.set()

    def _end_grace(self, router_id: str) -> None:
        grace = self._grace.pop(router_id, None)
        if grace is not None:
            grace.cancel()

    def _grace_over(self, router_id: str) -> None:
        del self._grace[router_id]
        self._router_gone(router_id)
