"""What a request in flight takes in from instances that know nothing of each other."""

import time

from kaveri.domain.sampling import SamplingParams
from kaveri.errors import Unavailable
from kaveri.v1 import decode_pb2, prefill_pb2
from services.router.requests import AcceptedRequest, Attempt, RequestEntry


class _NoText:
    stopped = False

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _entry() -> tuple[RequestEntry, Attempt]:
    params = SamplingParams(max_tokens=20, seed=1)
    now_s = time.monotonic()
    accepted = AcceptedRequest("r", (1, 2, 3), params, 100, now_s, now_s + 60)
    entry = RequestEntry(accepted, _NoText())  # type: ignore[arg-type]
    attempt = entry.begin_attempt(1, "prefill-0", 1)
    return entry, attempt


def _tokens(index: int, *token_ids: int, error: str = "") -> decode_pb2.RequestTokens:
    return decode_pb2.RequestTokens(request_id="r", attempt=1, index=index, token_ids=token_ids, error=error)


async def test_tokens_of_a_second_instance_are_not_put_behind_those_of_the_first() -> None:
    entry, attempt = _entry()
    entry.take_first_token(attempt, prefill_pb2.PrefillFirstToken(token_id=7))
    attempt.place_on("decode-0", 11)
    entry.take_tokens("decode-0", _tokens(1, 8, 9))
    attempt.place_on("decode-1", 12)
    # What the second one draws follows from its own tokens.
    entry.take_tokens("decode-1", _tokens(1, 80, 90, 100))
    entry.take_tokens("decode-0", _tokens(3, 10))
    assert entry.token_ids == [7, 8, 9]
    assert isinstance(attempt.lost, Unavailable)
    entry.release()


async def test_an_instance_that_draws_before_anyone_has_named_it_owns_the_attempt() -> None:
    entry, attempt = _entry()
    entry.take_tokens("decode-0", _tokens(1, 8))
    entry.take_tokens("decode-1", _tokens(1, 80))
    entry.take_first_token(attempt, prefill_pb2.PrefillFirstToken(token_id=7))
    assert entry.token_ids == [7, 8]
    attempt.place_on("decode-1", 12)
    assert isinstance(attempt.lost, Unavailable)
    entry.release()


async def test_an_attempt_that_moves_before_a_token_was_drawn_goes_on() -> None:
    entry, attempt = _entry()
    attempt.place_on("decode-0", 11)
    attempt.place_on("decode-1", 12)
    entry.take_first_token(attempt, prefill_pb2.PrefillFirstToken(token_id=7))
    # The former instance has landed the KV as well, and is being told to end.
    entry.take_tokens("decode-0", _tokens(1, 80))
    entry.take_tokens("decode-0", _tokens(0, error="its prefill instance has given the request up"))
    entry.take_tokens("decode-1", _tokens(1, 8))
    assert (entry.token_ids, attempt.lost) == ([7, 8], None)
    entry.release()
