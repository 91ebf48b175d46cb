"""Carries tokens to routers: one batch per engine step; fewer and larger ones when a stream is slow.

Tokens are kept in their requests' logs (answer_log.py), sent or not. A router's feed knows only which of its requests
have something that it has not been sent, so a stream that breaks loses nothing.
"""

from collections.abc import Callable, Iterable

from kaveri.engine.contract import TokenStep
from kaveri.feeds.feed import RouterFeeds
from services.decode.answer_log import End, GainedTokens
from services.decode.lifecycle import RequestTimes
from services.decode.requests import DecodeRequest


def gained_of(news: DecodeRequest | GainedTokens) -> GainedTokens:
    """Take what the router has not been sent of the request, or the notice itself."""
    if isinstance(news, GainedTokens):
        return news
    gained = news.log.take(news.request_id, news.owner)
    gained.read_here = news.reader is not None
    return gained


class TokenStreams:
    """What decode has for the streams of all routers. For one event loop."""

    def __init__(
        self,
        feeds: RouterFeeds,
        router_gone: Callable[[str], None],
        requests_of: Callable[[str], Iterable[DecodeRequest]],
    ) -> None:
        """router_gone: told when a router has been away for the grace time. requests_of: the requests of a router,
        ended ones that are kept included."""
        self._feeds = feeds
        self._requests_of = requests_of
        feeds.join(router_gone, self._unsent_of)

    def gain(self, request: DecodeRequest, step: TokenStep, times: RequestTimes | None) -> None:
        """Adds one token; `times` with the last one."""
        request.log.gain(step, times)
        if request.reader is not None:
            request.reader.changed()
            if not request.log.is_due:
                return
        self._feeds.add(request.router_id, request)

    def announce(self, request: DecodeRequest) -> None:
        """Sends an entry without tokens: the request is here, and waits for a seat.

        A router that has given it up before it heard of its placement answers with an abort.
        """
        self._feeds.add(request.router_id, request)

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
        self._feeds.add(router_id, notice)

    def drop(self, request: DecodeRequest) -> None:
        """Sends no more of the request to its router, nor to a caller that reads it here."""
        if request.reader is not None:
            request.reader.leave()
        self._feeds.discard(request.router_id, request)

    def send(self, request: DecodeRequest) -> None:
        """Sends what the request's log holds and was not sent. Its router may have changed."""
        self._feeds.expect(request.router_id)
        if request.log.has_unsent:
            self._feeds.add(request.router_id, request)

    def _unsent_of(self, router_id: str) -> list[DecodeRequest]:
        return [request for request in self._requests_of(router_id) if request.log.has_unsent]
