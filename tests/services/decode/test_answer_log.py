"""Log of an answer: sends its router the location of the request's KV copy."""

import pytest

from kaveri.domain.owner import Term
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.sampling import FinishReason
from kaveri.engine.contract import EngineKey, TokenStep
from kaveri.lives.decoding import Landed, Running, State
from services.decode.requests import AnswerLog, End
from tests.services.decode.built import built_owners, built_request, gain, next_batch

OWNER = Term(0, 1)


def test_news_of_a_copy_are_sent_once_and_again_to_a_router_that_attaches() -> None:
    log = AnswerLog(1, 1)
    assert log.take("r", OWNER).replica is None
    log.note_replica(ReplicaLocation("d1", 1, 16))
    log.note_replica(ReplicaLocation("d1", 1, 32))
    assert log.take("r", OWNER).replica == ReplicaLocation("d1", 1, 32)
    assert log.take("r", OWNER).replica is None
    log.send_from(log.next_index)
    assert log.take("r", OWNER).replica == ReplicaLocation("d1", 1, 32)


def test_no_copy_is_named_of_a_request_that_has_ended() -> None:
    log = AnswerLog(0, 0)
    log.note_replica(ReplicaLocation("d1", 1, 16))
    log.gain(TokenStep(EngineKey("r", 1), 0, 42, None, FinishReason.LENGTH), None)
    log.send_from(0)
    gained = log.take("r", OWNER)
    assert (gained.token_ids, gained.replica) == ([42], None)


def test_the_copy_of_a_moved_request_is_named_with_its_end() -> None:
    log = AnswerLog(0, 0)
    log.note_replica(ReplicaLocation("d1", 1, 16))
    log.take("r", OWNER)
    log.note_replica(ReplicaLocation("d1", 1, 21))
    log.end = End(error="it goes on at d1", moved=True)
    for _ in range(2):
        gained = log.take("r", OWNER)
        assert (gained.end.moved, gained.replica) == (True, ReplicaLocation("d1", 1, 21))
        # Another router attaches.
        log.send_from(0)


def test_a_resumed_request_draws_its_next_token_here() -> None:
    log = AnswerLog(5, 5)
    log.gain(TokenStep(EngineKey("r", 1), 5, 42, None, None), None)
    gained = log.take("r", OWNER)
    assert (gained.index, gained.token_ids) == (5, [42])


@pytest.mark.parametrize(("state", "has_message"), [(Running(0.0), False), (Landed(0.0), True)])
async def test_news_of_a_copy_needs_a_message_only_while_no_tokens_come(state: State, has_message: bool) -> None:
    owners, request = built_owners(), built_request(state=state)
    feed = owners.feeds.open("router")
    owners.announce_replica(request, ReplicaLocation("d1", 1, 16))
    assert (request in feed) is has_message
    gain(owners, request, 1)
    (gained,) = await next_batch(feed)
    assert gained.replica == ReplicaLocation("d1", 1, 16)
