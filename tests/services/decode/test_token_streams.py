"""What routers get when their streams are slow, late, replaced or broken; and which attempts are stale."""

import asyncio

import pytest

from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.engine.contract import EngineKey, EngineRequest, TokenStep
from kaveri.errors import StaleAttempt
from kaveri.policy.growth import BatchMember
from services.decode.lifecycle import InLine, RequestTimes
from services.decode.requests import DecodeRequest, KnownAttempts
from services.decode.token_streams import TokenStreams

WAIT_S = 10.0


def request(request_id: str = "a", router_id: str = "router") -> DecodeRequest:
    engine_request = EngineRequest(EngineKey(request_id, 1), (1,) * 10, 0, SamplingParams())
    return DecodeRequest(engine_request, 1, router_id, 0.0, 60.0, BatchMember(10), InLine(stays=False))


def gain(streams: TokenStreams, entry: DecodeRequest, index: int, finish: FinishReason | None = None) -> None:
    times = RequestTimes(0.1, 0.2, 0) if finish is not None else None
    streams.gain(entry, TokenStep(entry.key, index, 100 + index, None, finish), times)
    streams.flush()


class Gone:
    def __init__(self) -> None:
        self.routers: list[str] = []
        self.changed = asyncio.Event()

    def __call__(self, router_id: str) -> None:
        self.routers.append(router_id)
        self.changed.set()


async def test_one_step_of_many_requests_is_one_batch() -> None:
    streams = TokenStreams(10.0, Gone())
    stream = streams.open("router")
    entries = [request(str(number)) for number in range(5)]
    for entry in entries:
        streams.gain(entry, TokenStep(entry.key, 1, 7, None, None), None)
    streams.flush()
    batch = await asyncio.wait_for(stream.next_batch(), WAIT_S)
    assert [(gained.request_id, gained.index, gained.token_ids) for gained in batch] == [
        (str(number), 1, [7]) for number in range(5)
    ]


async def test_a_stream_without_tokens_has_a_beat_to_send_and_goes_on() -> None:
    streams = TokenStreams(10.0, Gone())
    stream = streams.open("router")
    assert await asyncio.wait_for(stream.next_batch(beat_s=0.01), WAIT_S) == []
    assert not stream.has_ended
    gain(streams, request(), 1)
    (gained,) = await asyncio.wait_for(stream.next_batch(), WAIT_S)
    assert gained.token_ids == [101]


async def test_a_closing_stream_ends_when_it_has_sent_everything() -> None:
    streams = TokenStreams(10.0, Gone())
    stream = streams.open("router")
    gain(streams, request(), 1)
    streams.close_all()
    assert not stream.has_ended
    assert len(await asyncio.wait_for(stream.next_batch(), WAIT_S)) == 1
    assert stream.has_ended


async def test_a_slow_stream_gets_the_tokens_of_several_steps_in_one_entry() -> None:
    streams = TokenStreams(10.0, Gone())
    stream = streams.open("router")
    entry = request()
    for index in range(1, 50):
        gain(streams, entry, index)
    gain(streams, entry, 50, FinishReason.LENGTH)
    (gained,) = await asyncio.wait_for(stream.next_batch(), WAIT_S)
    assert gained.index == 1
    assert gained.token_ids == list(range(101, 151))
    assert gained.finish is FinishReason.LENGTH
    assert gained.times is not None


async def test_tokens_are_kept_for_a_router_whose_stream_is_late() -> None:
    gone = Gone()
    streams = TokenStreams(10.0, gone)
    entry = request()
    streams.expect("router")
    gain(streams, entry, 1)
    stream = streams.open("router")
    (gained,) = await asyncio.wait_for(stream.next_batch(), WAIT_S)
    assert gained.token_ids == [101]
    assert gone.routers == []


async def test_a_router_that_never_opens_its_stream_counts_as_gone() -> None:
    gone = Gone()
    streams = TokenStreams(0.01, gone)
    streams.expect("router")
    await asyncio.wait_for(gone.changed.wait(), WAIT_S)
    assert gone.routers == ["router"]
    gain(streams, request(), 1)  # no stream to report to; nothing is kept
    stream = streams.open("router")
    streams.close_all()
    assert await stream.next_batch() == []


async def test_a_newer_stream_replaces_an_older_one_and_gets_its_unsent_tokens() -> None:
    gone = Gone()
    streams = TokenStreams(10.0, gone)
    entry = request()
    older = streams.open("router")
    gain(streams, entry, 1)
    newer = streams.open("router")
    assert await asyncio.wait_for(older.next_batch(), WAIT_S) == []
    streams.close(older)
    assert gone.routers == []
    (gained,) = await asyncio.wait_for(newer.next_batch(), WAIT_S)
    assert gained.token_ids == [101]
    streams.close(newer)
    assert gone.routers == ["router"]


async def test_a_router_that_was_cut_off_hears_which_requests_it_has_lost() -> None:
    entry = request()

    def lose(router_id: str) -> None:
        streams.fail(entry, "the router's token stream ended")

    streams = TokenStreams(10.0, lose)
    streams.close(streams.open("router"))
    again = streams.open("router")
    (gained,) = await asyncio.wait_for(again.next_batch(), WAIT_S)
    assert (gained.request_id, gained.error) == ("a", "the router's token stream ended")
    streams.close_all()


async def test_a_dropped_request_is_not_spoken_of() -> None:
    streams = TokenStreams(10.0, Gone())
    stream = streams.open("router")
    dropped, kept = request("dropped"), request("kept")
    gain(streams, dropped, 1)
    gain(streams, kept, 1)
    streams.drop(dropped)
    batch = await asyncio.wait_for(stream.next_batch(), WAIT_S)
    assert [gained.request_id for gained in batch] == ["kept"]


async def test_a_failure_follows_the_tokens_that_were_gained() -> None:
    streams = TokenStreams(10.0, Gone())
    stream = streams.open("router")
    entry = request()
    gain(streams, entry, 3)
    streams.fail(entry, "broken")
    (gained,) = await asyncio.wait_for(stream.next_batch(), WAIT_S)
    assert (gained.index, gained.token_ids, gained.error) == (3, [103], "broken")


async def test_streams_send_what_they_have_before_they_end() -> None:
    streams = TokenStreams(10.0, Gone())
    stream = streams.open("router")
    gain(streams, request(), 1)
    streams.close_all()
    assert len(await stream.next_batch()) == 1
    assert await stream.next_batch() == []
    assert await streams.open("late").next_batch() == []


async def test_a_failure_wakes_its_stream() -> None:
    streams = TokenStreams(10.0, Gone())
    stream = streams.open("router")
    waiting = asyncio.create_task(stream.next_batch())
    await asyncio.sleep(0)
    streams.fail(request(), "another router has begun it", replaced=True)
    (gained,) = await asyncio.wait_for(waiting, WAIT_S)
    assert (gained.error, gained.replaced) == ("another router has begun it", True)


def test_attempts_of_two_routers_are_not_compared() -> None:
    known = KnownAttempts(remembered_s=10.0, max_count=100)
    known.note("router", "a", 2**31 - 1, 0.0)
    known.note("other", "a", 1, 0.0)


def test_an_attempt_older_than_a_known_one_is_refused() -> None:
    known = KnownAttempts(remembered_s=10.0, max_count=100)
    known.note("router", "a", 2, 0.0)
    known.note("router", "a", 2, 1.0)
    with pytest.raises(StaleAttempt) as refused:
        known.note("router", "a", 1, 2.0)
    assert (refused.value.attempt, refused.value.newest_attempt) == (1, 2)
    known.note("router", "b", 1, 2.0)
    known.note("router", "a", 1, 11.5)  # forgotten: the id may be used again


def test_no_more_attempts_are_remembered_than_allowed() -> None:
    known = KnownAttempts(remembered_s=10.0, max_count=3)
    for number in range(10):
        known.note("router", str(number), 5, 0.0)
    known.note("router", "0", 1, 0.0)
    with pytest.raises(StaleAttempt):
        known.note("router", "9", 1, 0.0)


async def test_every_loss_of_tokens_is_counted_and_a_stream_knows_the_count_at_its_beginning() -> None:
    gone = Gone()
    streams = TokenStreams(0.01, gone)
    first = streams.open("router")
    assert (first.losses, streams.losses) == (0, 0)
    # What was on its way over a stream that is replaced may be lost.
    second = streams.open("router")
    assert second.losses == 1
    streams.close(first)
    assert streams.losses == 1
    streams.close(second)
    assert streams.losses == 2
    while len(gone.routers) < 2:
        await asyncio.wait_for(gone.changed.wait(), WAIT_S)
        gone.changed.clear()
    # The time of grace is over.
    assert streams.open("router").losses == 3
    streams.close_all()
