"""Carries tokens to routers: one stream per router, one batch per engine step; fewer and larger ones when it is slow.

Nothing here is bounded by a number of its own: a request waits in at most one entry, which holds no more than the
answer's own tokens, and there are no more requests than the engine's pool has room for.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.engine.contract import TokenStep
from services.decode.lifecycle import RequestTimes
from services.decode.requests import DecodeRequest

BEAT_S = 0.1
"""A stream without tokens sends an empty message this often: far less than the 0.5 s after which routers give it up."""


@dataclass(eq=False, slots=True)
class GainedTokens:
    """What one request gained and its router has not been sent."""

    request_id: str
    attempt: int
    index: int
    """Of the first of token_ids within the answer; 0 when there are none."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    times: RequestTimes | None = None
    error: str = ""
    replaced: bool = False


class TokenStream:
    """One router's subscription, and what waits for it. For one reader."""

    def __init__(self, router_id: str, unsent: dict[DecodeRequest, GainedTokens], losses: int) -> None:
        """losses: of TokenStreams, when it was opened."""
        self.router_id = router_id
        self.losses = losses
        self.unsent = unsent
        self.closed = False
        self.changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and has sent everything."""
        return self.closed and not self.unsent

    async def next_batch(self, beat_s: float = BEAT_S) -> list[GainedTokens]:
        """Takes all tokens that there are; waits for some for `beat_s` seconds at most."""
        if not self.unsent and not self.closed:
            self.changed.clear()
            beat = asyncio.get_running_loop().call_later(beat_s, self.changed.set)
            try:
                await self.changed.wait()
            finally:
                beat.cancel()
        batch = list(self.unsent.values())
        self.unsent.clear()
        return batch


class TokenStreams:
    """The streams of all routers. For one event loop."""

    def __init__(self, grace_s: float, router_gone: Callable[[str], None]) -> None:
        """grace_s: how long tokens are kept for a router that has no stream. router_gone: told when it has none any
        more, or got none in time; the tokens kept for it are gone."""
        self.losses = 0
        """How often tokens for a router were dropped, or may have been lost on their way. A router whose stream began
        at a higher count than its request was reserved at cannot wait for the request's tokens."""
        self._grace_s = grace_s
        self._router_gone = router_gone
        self._streams: dict[str, TokenStream] = {}
        # Routers without a stream that requests are here for: what is kept for them, and the end of their grace.
        self._kept: dict[str, dict[DecodeRequest, GainedTokens]] = {}
        self._grace: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    def open(self, router_id: str) -> TokenStream:
        """A stream for the router. An older one of the same router ends, and its unsent tokens go here."""
        grace = self._grace.pop(router_id, None)
        if grace is not None:
            grace.cancel()
        unsent = self._kept.pop(router_id, {})
        former = self._streams.get(router_id)
        if former is not None:
            # The reader of the former must find nothing: it shares no dict with the new stream.
            unsent, former.unsent = former.unsent, {}
            self._end(former)
            self.losses += 1
        stream = self._streams[router_id] = TokenStream(router_id, unsent, self.losses)
        if self._closed:
            self._end(stream)
        return stream

    def close(self, stream: TokenStream) -> None:
        """The stream is broken or cancelled. Unless a newer one has replaced it, its router counts as gone.

        What its requests are failed with is kept for the time of grace: a router that was only cut off must hear of
        those that it has placed here meanwhile.
        """
        if self._streams.get(stream.router_id) is stream:
            del self._streams[stream.router_id]
            self.losses += 1
            self.expect(stream.router_id)
            self._router_gone(stream.router_id)

    def close_all(self) -> None:
        """Ends every stream once it has sent what it has, and those that come as well."""
        self._closed = True
        for stream in self._streams.values():
            self._end(stream)
        for grace in self._grace.values():
            grace.cancel()

    def expect(self, router_id: str) -> None:
        """Tokens for the router will come; without a stream its time of grace begins, unless it did already."""
        if router_id not in self._streams and router_id not in self._grace and not self._closed:
            self._kept[router_id] = {}
            self._grace[router_id] = asyncio.get_running_loop().call_later(self._grace_s, self._grace_over, router_id)

    def gain(self, request: DecodeRequest, step: TokenStep, times: RequestTimes | None) -> None:
        """Adds one token; `times` with the last one. Consecutive tokens of a request share one entry."""
        unsent = self._unsent(request.router_id)
        if unsent is None:
            return
        entry = unsent.get(request)
        if entry is None:
            entry = unsent[request] = GainedTokens(request.request_id, request.attempt, step.index)
        elif not entry.token_ids:
            entry.index = step.index
        entry.token_ids.append(step.token_id)
        if step.logprobs is not None:
            entry.logprobs.append(step.logprobs)
        if step.finish is not None:
            entry.finish = step.finish
            entry.times = times

    def announce(self, request: DecodeRequest) -> None:
        """Sends an entry without tokens: the request is here, and waits for a seat.

        A router that has given it up before it heard of its placement answers with an abort.
        """
        unsent = self._unsent(request.router_id)
        if unsent is not None:
            unsent.setdefault(request, GainedTokens(request.request_id, request.attempt, 0))

    def fail(self, request: DecodeRequest, reason: str, replaced: bool = False) -> None:
        """Sends the router, behind the tokens gained, that the request cannot go on here.

        replaced: another router has begun a request with the same id.
        """
        unsent = self._unsent(request.router_id)
        if unsent is None:
            return
        entry = unsent.setdefault(request, GainedTokens(request.request_id, request.attempt, 0))
        entry.error, entry.replaced = reason, replaced
        stream = self._streams.get(request.router_id)
        if stream is not None:
            stream.changed.set()

    def drop(self, request: DecodeRequest) -> None:
        """Forgets what was not sent."""
        unsent = self._unsent(request.router_id)
        if unsent is not None:
            unsent.pop(request, None)

    def flush(self) -> None:
        """Wakes the streams that have something to send: once per batch of events."""
        for stream in self._streams.values():
            if stream.unsent:
                stream.changed.set()

    def _unsent(self, router_id: str) -> dict[DecodeRequest, GainedTokens] | None:
        stream = self._streams.get(router_id)
        return stream.unsent if stream is not None else self._kept.get(router_id)

    def _end(self, stream: TokenStream) -> None:
        stream.closed = True
        stream.changed.set()

    def _grace_over(self, router_id: str) -> None:
        del self._grace[router_id]
        del self._kept[router_id]
        self.losses += 1
        self._router_gone(router_id)
