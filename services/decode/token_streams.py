"""Carries tokens to routers: one stream per router, one batch per engine step; fewer and larger ones when it is slow.

Tokens are kept in their requests' logs (answer_log.py), sent or not. A stream knows only which of its requests have
something that it has not been sent, so a stream that breaks loses nothing.
"""

import asyncio
from collections.abc import Callable, Iterable

from kaveri.engine.contract import TokenStep
from kaveri.feeds.feed import Feed
from kaveri.timeouts import BEAT_S
from services.decode.answer_log import End, GainedTokens
from services.decode.lifecycle import RequestTimes
from services.decode.requests import DecodeRequest


class TokenStream:
    """One router's subscription."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.feed: Feed[DecodeRequest | GainedTokens] = Feed()
        """Requests, and notices of requests that are not here for the router."""

    async def next_batch(self, beat_s: float = BEAT_S) -> list[GainedTokens]:
        """Take all tokens that there are; wait beat_s seconds for some."""
        return [_gained(news) for news in await self.feed.take(beat_s)]


def _gained(news: DecodeRequest | GainedTokens) -> GainedTokens:
    if isinstance(news, GainedTokens):
        return news
    gained = news.log.take(news.request_id, news.owner)
    gained.read_here = news.reader is not None
    return gained


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
            for news in former.feed.drain():
                if isinstance(news, GainedTokens):
                    stream.feed.add(news)
            former.feed.close()
        for request in self._requests_of(router_id):
            if request.log.has_unsent:
                stream.feed.add(request)
        if self._closed:
            stream.feed.close()
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
            stream.feed.close()
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
            stream.feed.add(request)

    def announce(self, request: DecodeRequest) -> None:
        """Sends an entry without tokens: the request is here, and waits for a seat.

        A router that has given it up before it heard of its placement answers with an abort.
        """
        stream = self._streams.get(request.router_id)
        if stream is not None:
            stream.feed.add(request)

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

    def notify(self, router_id: str, notice: GainedTokens) -> None:
        """Sends the router something that is not the request's next part. Dropped when it has no stream."""
        stream = self._streams.get(router_id)
        if stream is not None:
            stream.feed.add(notice)

    def drop(self, request: DecodeRequest) -> None:
        """Sends no more of the request to its router, nor to a caller that reads it here."""
        if request.reader is not None:
            request.reader.leave()
        stream = self._streams.get(request.router_id)
        if stream is not None:
            stream.feed.discard(request)

    def send(self, request: DecodeRequest) -> None:
        """Sends what the request's log holds and was not sent. Its router may have changed."""
        stream = self._streams.get(request.router_id)
        if stream is None:
            self.expect(request.router_id)
        elif request.log.has_unsent:
            stream.feed.add(request)

    def _end_grace(self, router_id: str) -> None:
        grace = self._grace.pop(router_id, None)
        if grace is not None:
            grace.cancel()

    def _grace_over(self, router_id: str) -> None:
        del self._grace[router_id]
        self._router_gone(router_id)
