"""Unsent tokens are split into messages that gRPC accepts, in order, without loss or repetition."""

import pytest

from kaveri.domain.owner import Term
from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.lives.decoding import RequestTimes
from kaveri.rpc.server import MAX_MESSAGE_BYTES
from kaveri.v1 import feed_pb2
from services.decode.requests import GOING_ON, End, GainedTokens
from services.decode.server import messages_of, tokens_to_proto

LARGE_ID = 2**31 - 1
LOGPROBS = Logprobs(-1234.5678, tuple((LARGE_ID, -1234.5678) for _ in range(20)))


def gained(request_id: str, token_count: int, logprobs: bool = False, end: End = GOING_ON) -> GainedTokens:
    entries = [LOGPROBS] * token_count if logprobs else []
    return GainedTokens(request_id, Term(0, 1), 7, [LARGE_ID] * token_count, entries, end)


def sizes(messages: list[list[GainedTokens]]) -> list[int]:
    return [
        feed_pb2.FollowResponse(requests=[tokens_to_proto(entry) for entry in entries]).ByteSize()
        for entries in messages
    ]


def test_one_step_of_some_requests_is_one_message() -> None:
    batch = [gained(str(number), 1) for number in range(32)]
    assert list(messages_of(batch)) == [batch]
    assert list(messages_of([])) == []


@pytest.mark.parametrize(("requests", "tokens"), [(256, 1), (256, 32), (256, 1_900), (1, 131_072)])
def test_what_a_router_takes_in_at_once_is_bounded_for_any_number_of_requests_and_tokens(
    requests: int, tokens: int
) -> None:
    batch = [gained(f"{number:032x}", tokens) for number in range(requests)]
    messages = list(messages_of(batch))
    assert max(len(message) for message in messages) <= 64
    assert max(sum(len(entry.token_ids) for entry in message) for message in messages) <= 2_000
    assert sum(len(entry.token_ids) for message in messages for entry in message) == requests * tokens


def test_many_entries_go_in_messages_far_below_the_limit() -> None:
    batch = [gained(str(number), 2, logprobs=True) for number in range(500)]
    messages = list(messages_of(batch))
    assert [entry for entries in messages for entry in entries] == batch
    assert max(sizes(messages)) < MAX_MESSAGE_BYTES // 2
    assert len(messages) > 1


def test_an_entry_larger_than_a_message_goes_in_pieces_and_ends_with_the_last() -> None:
    times = RequestTimes(0.1, 0.2, 0)
    whole = gained("a", 30_000, logprobs=True, end=End(FinishReason.LENGTH, times))
    before, behind = gained("before", 1), gained("behind", 1)
    messages = list(messages_of([before, whole, behind]))
    assert max(sizes(messages)) < MAX_MESSAGE_BYTES // 2
    entries = [entry for message in messages for entry in message]
    assert (entries[0], entries[-1]) == (before, behind)
    pieces = entries[1:-1]
    assert len(pieces) > 1
    index = 7
    for piece in pieces:
        assert piece.index == index
        assert len(piece.token_ids) == len(piece.logprobs) > 0
        index += len(piece.token_ids)
    assert index == 7 + 30_000
    ends = [piece.end for piece in pieces]
    assert ends == [GOING_ON] * (len(pieces) - 1) + [End(FinishReason.LENGTH, times)]


def test_a_million_tokens_without_logprobs_go_in_pieces_too() -> None:
    messages = list(messages_of([gained("a", 1_000_000, end=End(error="engine fault"))]))
    assert max(sizes(messages)) < MAX_MESSAGE_BYTES // 2
    assert sum(len(piece.token_ids) for message in messages for piece in message) == 1_000_000
    assert [piece.end.error for message in messages for piece in message][-2:] == ["", "engine fault"]
