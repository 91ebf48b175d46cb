"""Router streams that are slow, late, replaced or broken; stale attempts."""

import asyncio

import pytest

from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import FinishReason
from kaveri.errors import RequestAlreadyExists, StaleAttempt
from kaveri.feeds.expiring import ExpiringMap
from services.decode.owners import RequestOwners
from services.decode.requests import End
from tests.services.decode.built import WAIT_S, built_owners, built_request, gain, next_batch


class Gone:
    def __init__(self) -> None:
        self.routers: list[str] = []
        self.changed = asyncio.Event()

    def __call__(self, router_id: str) -> None:
        self.routers.append(router_id)
        self.changed.set()


async def test_one_step_of_many_requests_is_one_batch() -> None:
    owners = built_owners()
    stream = owners.feeds.open("router")
    for number in range(5):
        gain(owners, built_request(str(number)), 1)
    batch = await next_batch(stream)
    assert [(gained.request_id, gained.index, gained.token_ids) for gained in batch] == [
        (str(number), 1, [101]) for number in range(5)
    ]


async def test_a_stream_sends_what_it_has_before_it_ends() -> None:
    owners = built_owners()
    stream = owners.feeds.open("router")
    gain(owners, built_request(), 1)
    owners.feeds.close_all()
    assert not stream.ended
    assert len(await next_batch(stream)) == 1
    assert stream.ended
    assert await next_batch(stream) == []
    assert await next_batch(owners.feeds.open("late")) == []


async def test_a_slow_stream_gets_the_tokens_of_several_steps_in_one_entry() -> None:
    owners, request = built_owners(), built_request()
    stream = owners.feeds.open("router")
    for index in range(1, 50):
        gain(owners, request, index)
    gain(owners, request, 50, FinishReason.LENGTH)
    (gained,) = await next_batch(stream)
    assert gained.index == 1
    assert gained.token_ids == list(range(101, 151))
    assert gained.end.finish is FinishReason.LENGTH
    assert gained.end.times is not None


async def test_tokens_are_kept_for_a_router_whose_stream_is_late() -> None:
    gone, request = Gone(), built_request()
    owners = built_owners(request, gone=gone)
    owners.feeds.expect("router")
    gain(owners, request, 1)
    (gained,) = await next_batch(owners.feeds.open("router"))
    assert gained.token_ids == [101]
    assert gone.routers == []


async def test_a_router_that_never_opens_its_stream_counts_as_gone() -> None:
    gone = Gone()
    owners = built_owners(grace_s=0.01, gone=gone)
    owners.feeds.expect("router")
    assert owners.feeds.missing_routers == ("router",)
    await asyncio.wait_for(gone.changed.wait(), WAIT_S)
    assert gone.routers == ["router"]
    stream = owners.feeds.open("router")
    owners.feeds.close_all()
    assert await next_batch(stream) == []


async def test_a_newer_stream_replaces_an_older_one_and_gets_its_unsent_tokens() -> None:
    request = built_request()
    owners = built_owners(request)
    older = owners.feeds.open("router")
    gain(owners, request, 1)
    newer = owners.feeds.open("router")
    assert await next_batch(older) == []
    owners.feeds.close(older)
    assert owners.feeds.missing_routers == ()
    (gained,) = await next_batch(newer)
    assert gained.token_ids == [101]
    owners.feeds.close(newer)
    assert owners.feeds.missing_routers == ("router",)
    owners.feeds.close_all()


async def test_a_stream_that_comes_in_time_ends_the_grace_and_goes_on_where_the_broken_one_was() -> None:
    gone, request = Gone(), built_request()
    owners = built_owners(request, gone=gone)
    broken = owners.feeds.open("router")
    gain(owners, request, 1)
    await next_batch(broken)
    owners.feeds.close(broken)
    gain(owners, request, 2)
    again = owners.feeds.open("router")
    assert owners.feeds.missing_routers == ()
    (gained,) = await next_batch(again)
    assert (gained.index, gained.token_ids) == (2, [102])
    assert gone.routers == []
    owners.feeds.close_all()


async def test_tokens_are_repeated_from_any_index_with_how_they_ended() -> None:
    request = built_request()
    owners = built_owners(request)
    stream = owners.feeds.open("router")
    for index in range(1, 6):
        gain(owners, request, index, FinishReason.LENGTH if index == 5 else None)
    await next_batch(stream)
    for index in (3, 6):
        request.log.send_from(index)
        owners._send(request)
        (gained,) = await next_batch(stream)
        assert (gained.index, gained.token_ids) == (index, [100 + each for each in range(index, 6)])
        assert gained.end.finish is FinishReason.LENGTH


async def test_a_dropped_request_is_not_spoken_of() -> None:
    owners = built_owners()
    stream = owners.feeds.open("router")
    dropped = built_request("dropped")
    gain(owners, dropped, 1)
    gain(owners, built_request("kept"), 1)
    owners.drop(dropped)
    assert [gained.request_id for gained in await next_batch(stream)] == ["kept"]


async def test_a_failure_follows_the_tokens_that_were_gained() -> None:
    owners, request = built_owners(), built_request()
    stream = owners.feeds.open("router")
    gain(owners, request, 1)
    owners.fail(request, End(error="broken"))
    (gained,) = await next_batch(stream)
    assert (gained.index, gained.token_ids, gained.end.error) == (1, [101], "broken")


async def test_a_failure_wakes_its_stream() -> None:
    owners = built_owners()
    waiting = asyncio.create_task(next_batch(owners.feeds.open("router")))
    await asyncio.sleep(0)
    owners.fail(built_request(), End(error="another router has begun it", replaced=True))
    (gained,) = await waiting
    assert (gained.end.error, gained.end.replaced) == ("another router has begun it", True)


def of(session: int, attempt: int, router_id: str = "router", secret: bytes = b"") -> Ownership:
    return Ownership(Term(session, attempt), router_id, secret)


@pytest.fixture
def known() -> RequestOwners:
    """RequestOwners that remembers three owners for ten seconds."""
    owners = built_owners()
    owners._newest = ExpiringMap(10.0, max_count=3)
    return owners


def test_attempts_of_two_routers_without_a_secret_are_not_compared(known: RequestOwners) -> None:
    known._note_newest("a", of(0, 2**31 - 1), 0.0)
    known._note_newest("a", of(0, 1, "other"), 0.0)


def test_an_attempt_older_than_a_known_one_is_refused(known: RequestOwners) -> None:
    known._note_newest("a", of(0, 2), 0.0)
    known._note_newest("a", of(0, 2), 1.0)
    with pytest.raises(StaleAttempt) as refused:
        known._note_newest("a", of(0, 1), 2.0)
    assert (refused.value.attempt, refused.value.newest_attempt) == (1, 2)
    known._note_newest("b", of(0, 1), 2.0)
    known._note_newest("a", of(0, 1), 11.5)  # forgotten: the id may be used again


def test_an_older_session_is_refused_whichever_router_has_it(known: RequestOwners) -> None:
    secret = b"s" * 16
    known._note_newest("a", of(1, 1, "second", secret), 0.0)
    with pytest.raises(RequestAlreadyExists):
        known._note_newest("a", of(0, 9, "first", secret), 1.0)
    known._note_newest("a", of(0, 9, "first", b"t" * 16), 1.0)  # another request with the same id


def test_no_more_attempts_are_remembered_than_allowed(known: RequestOwners) -> None:
    for number in range(10):
        known._note_newest(str(number), of(0, 5), 0.0)
    known._note_newest("0", of(0, 1), 0.0)
    with pytest.raises(StaleAttempt):
        known._note_newest("9", of(0, 1), 0.0)
