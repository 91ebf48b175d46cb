"""What one reader has not been sent. No I/O."""

import asyncio
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Generic, TypeVar

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

    def close(self) -> None:
        """End the feed once all of its items are taken."""
        self._closed = True
        self._changed.set()

    async def take(self, beat_s: float | None = None, most: int | None = None) -> list[ItemT]:
        """Remove and return the first items, at most `most`; wait until there are some.

        Empty: beat_s seconds have passed, or the feed has ended.
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
