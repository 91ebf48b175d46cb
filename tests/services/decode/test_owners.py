"""Former owners and strangers do not change a request, and get an error."""

import pytest

from kaveri.domain.attachment import Attachment
from kaveri.domain.owner import Ownership, Term
from kaveri.errors import RequestAlreadyExists, RequestNotFound
from kaveri.feeds.expiring import ExpiringMap
from kaveri.lives.decoding import InLine, Running, State
from services.decode.owners import Awaited, RequestOwners
from services.decode.requests import DecodeRequest, ResumedHere
from tests.services.decode.built import PROMPT, built_owners, built_request, next_batch, token

SECRET = b"s" * 16
FORMER = Ownership(Term(0, 2), "router-0", SECRET)
PRESENT = Ownership(Term(1, 1), "router-1", SECRET)


@pytest.fixture
def owners() -> RequestOwners:
    """RequestOwners that forgets absent requests at once."""
    made = built_owners()
    made._newest = ExpiringMap(0.0, max_count=0)
    return made


def add(owners: RequestOwners, state: State | None = None) -> DecodeRequest:
    """Add a request with five sent tokens after the first one."""
    request = built_request("r", PRESENT, state or Running(0.0), max_tokens=20)
    owners.add(request)
    for index in range(1, 6):
        request.log.gain(token(request, index), None)
    request.log.take("r", request.ownership.term)
    return request


@pytest.mark.parametrize("owner", [FORMER, PRESENT._replace(router_id="router-0")])
async def test_a_stream_that_is_opened_again_gets_no_request_that_belongs_to_another(
    owners: RequestOwners, owner: Ownership
) -> None:
    request = add(owners)
    (notice,) = owners.repeat(owner.router_id, [Awaited("r", owner.term, 2)])
    assert (notice.term, notice.token_ids) == (owner.term, [])
    assert "another owner" in notice.end.error
    assert not request.log.has_unsent, "its own router would get tokens again"


async def test_a_stream_that_is_opened_again_goes_on_where_its_router_is(owners: RequestOwners) -> None:
    add(owners)
    assert owners.repeat("router-1", [Awaited("r", PRESENT.term, 3)]) == []
    (gained,) = await next_batch(owners.feeds.open("router-1"))
    assert (gained.index, gained.token_ids) == (3, [103, 104, 105])


def test_only_the_owner_that_has_resumed_a_request_is_told_so(owners: RequestOwners) -> None:
    request = add(owners)
    request.resumed = ResumedHere(8, None)  # type: ignore[arg-type]
    assert owners.resumed("r", PRESENT) is request
    for other in (FORMER, PRESENT._replace(term=Term(1, 2)), PRESENT._replace(secret=b"another secret, too")):
        assert owners.resumed("r", other) is None


async def test_a_former_owner_is_refused_however_long_the_present_one_has_the_request(owners: RequestOwners) -> None:
    add(owners)
    with pytest.raises(RequestAlreadyExists):
        owners.note_owner("r", FORMER)
    with pytest.raises(RequestAlreadyExists):
        owners.attach(Attachment("r", FORMER, (*PROMPT, 100), 1))
    assert owners.attach(Attachment("r", PRESENT, (*PROMPT, 100), 1)).params.max_tokens == 20
    owners.feeds.close_all()


@pytest.mark.parametrize(
    ("state", "generated", "reason"),
    [(InLine(stays=False), (100,), "not landed"), (Running(0.0), (), "first token is known to prefill alone")],
)
def test_what_prefill_has_still_to_tell_of_a_request_is_asked_of_prefill(
    owners: RequestOwners, state: State, generated: tuple[int, ...], reason: str
) -> None:
    add(owners, state)
    with pytest.raises(RequestNotFound, match=reason):
        owners.attach(Attachment("r", PRESENT, (*PROMPT, *generated), len(generated), landed=True))
