"""Queues of requests with unsent output, one queue per stream to a router or client. No I/O."""

import asyncio
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from kaveri.timeouts import BEAT_S

ItemT = TypeVar("ItemT", bound=Hashable)


class Feed(Generic[ItemT]):
    """Queue of items with something to send to one reader. An item is queued once however much it has to send, so a
    slow reader costs no more memory. For one event loop and one task that calls take()."""

    def __init__(self, news: Iterable[ItemT] = ()) -> None:
        self._news: dict[ItemT, None] = dict.fromkeys(news)
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """True once close() was called and all items are taken."""
        return self._closed and not self._news

    @property
    def closed(self) -> bool:
        """True once close() was called."""
        return self._closed

    def __contains__(self, item: ItemT) -> bool:
        return item in self._news

    def add(self, item: ItemT) -> None:
        """Queue the item, unless it is queued already."""
        self._news[item] = None
        self._changed.set()

    def discard(self, item: ItemT) -> None:
        """Remove the item from the queue."""
        self._news.pop(item, None)

    def drain(self) -> list[ItemT]:
        """Remove and return all items, without waiting."""
        items = list(self._news)
        self._news.clear()
        return items

    def wake(self) -> None:
        """Make a waiting take() return, even without items."""
        self._changed.set()

    def close(self) -> None:
        """Close the feed, which ends once all of its items are taken."""
        self._closed = True
        self._changed.set()

    async def take(self, beat_s: float | None = None, most: int | None = None) -> list[ItemT]:
        """Wait for items; remove and return the first ones, at most `most` (None: all). Returns an empty list after
        beat_s seconds (None: no limit), after wake(), and once the feed has ended."""
        if not (self._news or self._closed):
            self._changed.clear()
            beat = asyncio.get_running_loop().call_later(beat_s, self._changed.set) if beat_s is not None else None
            try:
                await self._changed.wait()
            finally:
                if beat is not None:
                    beat.cancel()
        items = list(islice(self._news, most))
        for item in items:
            del self._news[item]
        return items


class RouterFeed(Feed[Hashable]):
    """Queue of requests with unsent output for one router, read by one of its streams."""

    def __init__(self, router_id: str, news: Iterable[Hashable]) -> None:
        super().__init__(news)
        self.router_id = router_id


class _Phase(NamedTuple):
    router_gone: Callable[[str], None]
    unsent_of: Callable[[str], Iterable[Hashable]]


class RouterFeeds:
    """Queues of unsent output for all routers with a stream to one instance. Not thread-safe. Items are requests and
    notices. Requests' own logs keep what was not sent, so a broken stream loses only notices."""

    def __init__(self, grace_s: float) -> None:
        """grace_s: seconds that a router without a stream has to open one."""
        self._grace_s = grace_s
        self._phases: list[_Phase] = []
        self._feeds: dict[str, RouterFeed] = {}
        self._grace: dict[str, asyncio.TimerHandle] = {}
        """Timers of routers that have requests here and no stream."""
        self._closed = False

    def join(self, router_gone: Callable[[str], None], unsent_of: Callable[[str], Iterable[Hashable]]) -> None:
        """Add a phase, prefill or decode. router_gone: called with the id of a router that has had no stream for the
        grace time. unsent_of: returns a router's requests with unsent output, ended ones included."""
        self._phases.append(_Phase(router_gone, unsent_of))

    @property
    def missing_routers(self) -> tuple[str, ...]:
        """Ids of routers that have, or had, requests here but no stream. Their requests are called orphans."""
        return tuple(self._grace)

    def has(self, router_id: str) -> bool:
        """Return True if the router has a stream."""
        return router_id in self._feeds

    def open(self, router_id: str) -> RouterFeed:
        """Create the feed of a router's new stream, with all items that have unsent news. An older stream ends."""
        self._end_grace(router_id)
        former = self._feeds.get(router_id)
        unsent = dict.fromkeys(item for phase in self._phases for item in phase.unsent_of(router_id))
        feed = RouterFeed(router_id, {**dict.fromkeys(former.drain() if former is not None else ()), **unsent})
        self._feeds[router_id] = feed
        if former is not None:
            former.close()
        if self._closed:
            feed.close()
        return feed

    def close(self, feed: RouterFeed) -> None:
        """Remove the feed of a broken stream. Without a newer one, the router has grace_s seconds to open another."""
        if self._feeds.get(feed.router_id) is feed:
            del self._feeds[feed.router_id]
            self.expect(feed.router_id)

    def close_all(self) -> None:
        """End every stream, later ones included, once its items are sent."""
        self._closed = True
        for feed in self._feeds.values():
            feed.close()
        for router_id in self.missing_routers:
            self._end_grace(router_id)

    def expect(self, router_id: str) -> None:
        """Record that a router has requests here: its stream starts heartbeats, or it has grace_s to open one."""
        feed = self._feeds.get(router_id)
        if feed is not None:
            feed.wake()
        elif router_id not in self._grace and not self._closed:
            loop = asyncio.get_running_loop()
            self._grace[router_id] = loop.call_later(self._grace_s, self._grace_over, router_id)

    def add(self, router_id: str, item: Hashable) -> None:
        """Queue the item for the router's stream; does nothing without a stream."""
        feed = self._feeds.get(router_id)
        if feed is not None:
            feed.add(item)

    def discard(self, router_id: str, item: Hashable) -> None:
        """Remove the item from the queue for the router's stream."""
        feed = self._feeds.get(router_id)
        if feed is not None:
            feed.discard(item)

    async def wait_sent(self, is_idle: asyncio.Event) -> None:
        """Wait until the instance is idle (`is_idle` is set) and routers have had time to read the last output."""
        while True:
            await is_idle.wait()
            if not self._feeds:
                return
            await asyncio.sleep(BEAT_S)
            if is_idle.is_set():
                return

    def _end_grace(self, router_id: str) -> None:
        grace = self._grace.pop(router_id, None)
        if grace is not None:
            grace.cancel()

    def _grace_over(self, router_id: str) -> None:
        del self._grace[router_id]
        for phase in self._phases:
            phase.router_gone(router_id)
