"""What readers have not been sent: one feed per reader, whichever phase its news is of. No I/O."""

import asyncio
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from kaveri.timeouts import BEAT_S

ItemT = TypeVar("ItemT", bound=Hashable)


class Feed(Generic[ItemT]):
    """Items with news for one reader, each once however often it has some; a slow reader costs no more memory.

    For one event loop and one task that takes.
    """

    def __init__(self, news: Iterable[ItemT] = ()) -> None:
        self._news: dict[ItemT, None] = dict.fromkeys(news)
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether close() was called and everything is taken."""
        return self._closed and not self._news

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def __contains__(self, item: ItemT) -> bool:
        return item in self._news

    def add(self, item: ItemT) -> None:
        """Enter news of the item, behind all others unless it is there already."""
        self._news[item] = None
        self._changed.set()

    def discard(self, item: ItemT) -> None:
        """Leave the item's news out."""
        self._news.pop(item, None)

    def drain(self) -> list[ItemT]:
        """Remove and return all items, without waiting."""
        items = list(self._news)
        self._news.clear()
        return items

    def wake(self) -> None:
        """Have take() return, without items if there are none."""
        self._changed.set()

    def close(self) -> None:
        """End the feed once all of its items are taken."""
        self._closed = True
        self._changed.set()

    async def take(self, beat_s: float | None = None, most: int | None = None) -> list[ItemT]:
        """Remove and return the first items, at most `most`; wait until there are some.

        Empty: beat_s seconds have passed, it was woken, or the feed has ended.
        """
        if not (self._news or self._closed):
            self._changed.clear()
            beat = asyncio.get_running_loop().call_later(beat_s, self._changed.set) if beat_s is not None else None
            try:
                await self._changed.wait()
            finally:
                if beat is not None:
                    beat.cancel()
        if most is None or len(self._news) <= most:
            return self.drain()
        items = list(islice(self._news, most))
        for item in items:
            del self._news[item]
        return items


class RouterFeed(Feed[Hashable]):
    """News for one router, over one of its streams."""

    def __init__(self, router_id: str, news: Iterable[Hashable]) -> None:
        super().__init__(news)
        self.router_id = router_id


class _Phase(NamedTuple):
    router_gone: Callable[[str], None]
    unsent_of: Callable[[str], Iterable[Hashable]]


class RouterFeeds:
    """The feeds of all routers at one instance. For one event loop.

    Items are requests, whose logs keep what was not sent, and notices. A stream that breaks loses nothing of logs.
    """

    def __init__(self, grace_s: float) -> None:
        """grace_s: seconds that a router without a stream may take to open one."""
        self._grace_s = grace_s
        self._phases: list[_Phase] = []
        self._feeds: dict[str, RouterFeed] = {}
        self._grace: dict[str, asyncio.TimerHandle] = {}
        """Of routers that requests are here for and that have no stream."""
        self._closed = False

    def join(self, router_gone: Callable[[str], None], unsent_of: Callable[[str], Iterable[Hashable]]) -> None:
        """Add a phase. router_gone: called for a router whose grace is over. unsent_of: returns the requests of a
        router, ended ones included, with something that was not sent."""
        self._phases.append(_Phase(router_gone, unsent_of))

    @property
    def missing_routers(self) -> tuple[str, ...]:
        """Routers without a stream for which requests are, or were, here: those requests are orphans."""
        return tuple(self._grace)

    def has(self, router_id: str) -> bool:
        """Return True if the router has a stream."""
        return router_id in self._feeds

    def open(self, router_id: str) -> RouterFeed:
        """Return the feed of a new stream of the router. The one of an older stream ends; what it has not sent goes
        here."""
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
        """End a stream that is broken or cancelled. Unless a newer one has replaced it, its router's grace begins."""
        if self._feeds.get(feed.router_id) is feed:
            del self._feeds[feed.router_id]
            self.expect(feed.router_id)

    def close_all(self) -> None:
        """End every stream once it has sent what it has, and those that come as well."""
        self._closed = True
        for feed in self._feeds.values():
            feed.close()
        for router_id in self.missing_routers:
            self._end_grace(router_id)

    def expect(self, router_id: str) -> None:
        """Note that requests are here for the router: its stream beats from now on. Without a stream its grace begins,
        unless it did already."""
        feed = self._feeds.get(router_id)
        if feed is not None:
            feed.wake()
        elif router_id not in self._grace and not self._closed:
            loop = asyncio.get_running_loop()
            self._grace[router_id] = loop.call_later(self._grace_s, self._grace_over, router_id)

    def add(self, router_id: str, item: Hashable) -> None:
        """Enter news of the item; it is left out when the router has no stream."""
        feed = self._feeds.get(router_id)
        if feed is not None:
            feed.add(item)

    def discard(self, router_id: str, item: Hashable) -> None:
        """Leave the item's news out."""
        feed = self._feeds.get(router_id)
        if feed is not None:
            feed.discard(item)

    async def wait_sent(self, is_idle: asyncio.Event) -> None:
        """Wait until there is nothing to do and routers had time to read the last news: they are to hear of it before
        they hear that this instance has left."""
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
