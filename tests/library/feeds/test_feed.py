"""Feed: each item once, in the order in which it was added, and an end."""

import asyncio

from kaveri.feeds.feed import Feed

WAIT_S = 5.0


async def test_an_item_with_news_twice_is_taken_once_in_its_first_place() -> None:
    feed: Feed[str] = Feed(["a"])
    for item in ("b", "a", "c"):
        feed.add(item)
    feed.discard("b")
    feed.discard("unknown")
    assert "b" not in feed
    assert await feed.take() == ["a", "c"]
    feed.add("a")
    assert await feed.take() == ["a"]


async def test_a_reader_that_waits_is_woken_by_news() -> None:
    feed: Feed[str] = Feed()
    taking = asyncio.create_task(feed.take(beat_s=2 * WAIT_S))
    await asyncio.sleep(0)
    feed.add("a")
    assert await asyncio.wait_for(taking, WAIT_S) == ["a"]


async def test_without_news_the_reader_gets_nothing_after_a_beat() -> None:
    feed: Feed[str] = Feed()
    assert await asyncio.wait_for(feed.take(beat_s=0.01), WAIT_S) == []
    assert not feed.ended


async def test_of_many_items_the_first_ones_are_taken() -> None:
    feed = Feed("abc")
    assert await feed.take(most=2) == ["a", "b"]
    assert await feed.take(most=2) == ["c"]


async def test_a_closed_feed_ends_once_all_is_taken() -> None:
    feed = Feed("ab")
    feed.close()
    assert feed.closed
    assert not feed.ended
    assert await feed.take(most=1) == ["a"]
    assert await feed.take() == ["b"]
    assert feed.ended
    assert await asyncio.wait_for(feed.take(), WAIT_S) == []


async def test_close_wakes_the_reader() -> None:
    feed: Feed[str] = Feed()
    taking = asyncio.create_task(feed.take())
    await asyncio.sleep(0)
    feed.close()
    assert await asyncio.wait_for(taking, WAIT_S) == []
