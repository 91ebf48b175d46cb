"""What routers get when their streams are slow, late, replaced or broken; and which attempts are stale."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import FinishReason, ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest, TokenStep
from kaveri.errors import RequestAlreadyExists, StaleAttempt
from kaveri.feeds.feed import RouterFeed, RouterFeeds
from kaveri.policy.growth import BatchMember
from services.decode.answer_log import End, GainedTokens
from services.decode.lifecycle import InLine, RequestTimes
from services.decode.requests import DecodeRequest, KnownAttempts
from services.decode.token_streams import TokenStreams, gained_of

WAIT_S = 60.0


def request(request_id: str = "a", router_id: str = "router") -> DecodeRequest:
    engine_request = EngineRequest(EngineKey(request_id, 1), (1,) * 10, 0, ResolvedParams())
    ownership = Ownership(Owner(0, 1), router_id)
    return DecodeRequest(engine_request, ownership, 0.0, 60.0, BatchMember(10), InLine(stays=False))


class Streams(TokenStreams):
    """With the feeds of one phase."""

    def __init__(self, grace_s: float, *of_routers: Any) -> None:
        self.feeds = RouterFeeds(grace_s)
        super().__init__(self.feeds, *of_routers)


def streams_of(*requests: DecodeRequest, grace_s: float = 10.0, gone: Callable[[str], None] = lambda name: None) -> Any:
    """The streams of routers that these requests are here for."""
    return Streams(grace_s, gone, lambda name: [each for each in requests if each.router_id == name])


async def next_batch(feed: RouterFeed, beat_s: float = WAIT_S) -> list[GainedTokens]:
    """What a stream sends next."""
    return [gained_of(news) for news in await feed.take(beat_s)]  # type: ignore[arg-type]


def gain(streams: TokenStreams, entry: DecodeRequest, index: int, finish: FinishReason | None = None) -> None:
    times = RequestTimes(0.1, 0.2, 0) if finish is not None else None
    streams.gain(entry, TokenStep(entry.key, index, 100 + index, None, finish), times)


class Gone:
    def __init__(self) -> None:
        self.routers: list[str] = []
        self.changed = asyncio.Event()

    def __call__(self, router_id: str) -> None:
        self.routers.append(router_id)
        self.changed.set()


async def test_one_step_of_many_requests_is_one_batch() -> None:
    streams = streams_of()
    stream = streams.feeds.open("router")
    entries = [request(str(number)) for number in range(5)]
    for entry in entries:
        streams.gain(entry, TokenStep(entry.key, 1, 7, None, None), None)
    batch = await asyncio.wait_for(next_batch(stream), WAIT_S)
    assert [(gained.request_id, gained.index, gained.token_ids) for gained in batch] == [
        (str(number), 1, [7]) for number in range(5)
    ]


async def test_a_stream_without_tokens_has_a_beat_to_send_and_goes_on() -> None:
    streams = streams_of()
    stream = streams.feeds.open("router")
    assert await asyncio.wait_for(next_batch(stream, beat_s=0.01), WAIT_S) == []
    assert not stream.ended
    gain(streams, request(), 1)
    (gained,) = await asyncio.wait_for(next_batch(stream), WAIT_S)
    assert gained.token_ids == [101]


async def test_a_closing_stream_ends_when_it_has_sent_everything() -> None:
    streams = streams_of()
    stream = streams.feeds.open("router")
    gain(streams, request(), 1)
    streams.feeds.close_all()
    assert not stream.ended
    assert len(await asyncio.wait_for(next_batch(stream), WAIT_S)) == 1
    assert stream.ended


async def test_a_slow_stream_gets_the_tokens_of_several_steps_in_one_entry() -> None:
    streams = streams_of()
    stream = streams.feeds.open("router")
    entry = request()
    for index in range(1, 50):
        gain(streams, entry, index)
    gain(streams, entry, 50, FinishReason.LENGTH)
    (gained,) = await asyncio.wait_for(next_batch(stream), WAIT_S)
    assert gained.index == 1
    assert gained.token_ids == list(range(101, 151))
    assert gained.end.finish is FinishReason.LENGTH
    assert gained.end.times is not None


async def test_tokens_are_kept_for_a_router_whose_stream_is_late() -> None:
    gone = Gone()
    entry = request()
    streams = streams_of(entry, gone=gone)
    streams.feeds.expect("router")
    gain(streams, entry, 1)
    stream = streams.feeds.open("router")
    (gained,) = await asyncio.wait_for(next_batch(stream), WAIT_S)
    assert gained.token_ids == [101]
    assert gone.routers == []


async def test_a_router_that_never_opens_its_stream_counts_as_gone() -> None:
    gone = Gone()
    streams = streams_of(grace_s=0.01, gone=gone)
    streams.feeds.expect("router")
    assert streams.feeds.missing_routers == ("router",)
    await asyncio.wait_for(gone.changed.wait(), WAIT_S)
    assert gone.routers == ["router"]
    stream = streams.feeds.open("router")
    streams.feeds.close_all()
    assert await next_batch(stream) == []


async def test_a_newer_stream_replaces_an_older_one_and_gets_its_unsent_tokens() -> None:
    entry = request()
    streams = streams_of(entry)
    older = streams.feeds.open("router")
    gain(streams, entry, 1)
    newer = streams.feeds.open("router")
    assert await asyncio.wait_for(next_batch(older), WAIT_S) == []
    streams.feeds.close(older)
    assert streams.feeds.missing_routers == ()
    (gained,) = await asyncio.wait_for(next_batch(newer), WAIT_S)
    assert gained.token_ids == [101]
    streams.feeds.close(newer)
    assert streams.feeds.missing_routers == ("router",)
    streams.feeds.close_all()


async def test_a_stream_that_comes_in_time_ends_the_grace_and_goes_on_where_the_broken_one_was() -> None:
    gone, entry = Gone(), request()
    streams = streams_of(entry, gone=gone)
    broken = streams.feeds.open("router")
    gain(streams, entry, 1)
    await asyncio.wait_for(next_batch(broken), WAIT_S)
    streams.feeds.close(broken)
    gain(streams, entry, 2)
    again = streams.feeds.open("router")
    assert streams.feeds.missing_routers == ()
    (gained,) = await asyncio.wait_for(next_batch(again), WAIT_S)
    assert (gained.index, gained.token_ids) == (2, [102])
    assert gone.routers == []
    streams.feeds.close_all()


async def test_tokens_are_repeated_from_any_index_with_how_they_ended() -> None:
    entry = request()
    streams = streams_of(entry)
    stream = streams.feeds.open("router")
    for index in range(1, 6):
        gain(streams, entry, index, FinishReason.LENGTH if index == 5 else None)
    await asyncio.wait_for(next_batch(stream), WAIT_S)
    for index in (3, 6):
        entry.log.send_from(index)
        streams.send(entry)
        (gained,) = await asyncio.wait_for(next_batch(stream), WAIT_S)
        assert (gained.index, gained.token_ids) == (index, [100 + each for each in range(index, 6)])
        assert gained.end.finish is FinishReason.LENGTH


async def test_a_dropped_request_is_not_spoken_of() -> None:
    streams = streams_of()
    stream = streams.feeds.open("router")
    dropped, kept = request("dropped"), request("kept")
    gain(streams, dropped, 1)
    gain(streams, kept, 1)
    streams.drop(dropped)
    batch = await asyncio.wait_for(next_batch(stream), WAIT_S)
    assert [gained.request_id for gained in batch] == ["kept"]


async def test_a_failure_follows_the_tokens_that_were_gained() -> None:
    streams = streams_of()
    stream = streams.feeds.open("router")
    entry = request()
    gain(streams, entry, 1)
    streams.fail(entry, End(error="broken"))
    (gained,) = await asyncio.wait_for(next_batch(stream), WAIT_S)
    assert (gained.index, gained.token_ids, gained.end.error) == (1, [101], "broken")


async def test_streams_send_what_they_have_before_they_end() -> None:
    streams = streams_of()
    stream = streams.feeds.open("router")
    gain(streams, request(), 1)
    streams.feeds.close_all()
    assert len(await next_batch(stream)) == 1
    assert await next_batch(stream) == []
    assert await next_batch(streams.feeds.open("late")) == []


async def test_a_failure_wakes_its_stream() -> None:
    streams = streams_of()
    stream = streams.feeds.open("router")
    waiting = asyncio.create_task(next_batch(stream, beat_s=2 * WAIT_S))
    await asyncio.sleep(0)
    streams.fail(request(), End(error="another router has begun it", replaced=True))
    (gained,) = await asyncio.wait_for(waiting, WAIT_S)
    assert (gained.end.error, gained.end.replaced) == ("another router has begun it", True)


def of(session: int, attempt: int, router_id: str = "router", secret: bytes = b"") -> Ownership:
    return Ownership(Owner(session, attempt), router_id, secret)


def test_attempts_of_two_routers_without_a_secret_are_not_compared() -> None:
    known = KnownAttempts(ttl_s=10.0, max_count=100)
    known.note("a", of(0, 2**31 - 1), 0.0)
    known.note("a", of(0, 1, "other"), 0.0)


def test_an_attempt_older_than_a_known_one_is_refused() -> None:
    known = KnownAttempts(ttl_s=10.0, max_count=100)
    known.note("a", of(0, 2), 0.0)
    known.note("a", of(0, 2), 1.0)
    with pytest.raises(StaleAttempt) as refused:
        known.note("a", of(0, 1), 2.0)
    assert (refused.value.attempt, refused.value.newest_attempt) == (1, 2)
    known.note("b", of(0, 1), 2.0)
    known.note("a", of(0, 1), 11.5)  # forgotten: the id may be used again


def test_an_older_session_is_refused_whichever_router_has_it() -> None:
    known = KnownAttempts(ttl_s=10.0, max_count=100)
    secret = b"s" * 16
    known.note("a", of(1, 1, "second", secret), 0.0)
    with pytest.raises(RequestAlreadyExists):
        known.note("a", of(0, 9, "first", secret), 1.0)
    known.note("a", of(0, 9, "first", b"t" * 16), 1.0)  # another request with the same id


def test_no_more_attempts_are_remembered_than_allowed() -> None:
    known = KnownAttempts(ttl_s=10.0, max_count=3)
    for number in range(10):
        known.note(str(number), of(0, 5), 0.0)
    known.note("0", of(0, 1), 0.0)
    with pytest.raises(StaleAttempt):
        known.note("9", of(0, 1), 0.0)
