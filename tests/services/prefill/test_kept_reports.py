"""Memory of large prompt reports: only the router that asked for one may lose a part of it."""

import pytest

from kaveri.domain.attachment import Attachment
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import Logprobs
from kaveri.engine.contract import FirstToken, KvPushed, PrefillStarted, PromptLogprobs
from kaveri.lives.prompt import FirstTokenDrawn, PromptScored, RoomReserved, Started
from services.prefill.requests import PrefillRequest
from tests.services.prefill.scripted import params
from tests.services.prefill.test_prefill_role import RoleWorld, told

SECRET = b"s" * 16
ENTRY = Logprobs(-1.0, tuple((token_id, -2.0) for token_id in range(20)))


def attach(world: RoleWorld, request_id: str, session: int) -> PrefillRequest:
    ownership = Ownership(Term(session, 1), "router", SECRET)
    world.role.attach(Attachment(request_id, ownership, (1,) * 20, 0))
    request = world.role._find(request_id)
    assert request is not None
    return request


def score(world: RoleWorld, request: PrefillRequest, count: int = 19) -> None:
    world.role.handle(
        [PrefillStarted(request.engine_request.key), PromptLogprobs(request.engine_request.key, 1, (ENTRY,) * count)]
    )
    world.role.handle([FirstToken(request.engine_request.key, 5, None, None)])


@pytest.mark.parametrize(("session", "is_repeated"), [(0, True), (1, False)])
async def test_a_report_is_repeated_for_the_router_that_has_asked_for_it_alone(session: int, is_repeated: bool) -> None:
    world = RoleWorld()
    score(world, world.accept("a", secret=SECRET))
    again = attach(world, "a", session)
    kinds = {type(progress) for progress in await told(again)}
    assert kinds == {Started, FirstTokenDrawn} | ({PromptScored} if is_repeated else set())
    world.role.cancel(again)


async def test_what_ends_is_kept_without_its_report_which_its_reader_still_gets() -> None:
    world = RoleWorld()
    small = world.accept("small", secret=SECRET)
    world.hand_over_to_decode(small)
    large = world.accept("large", secret=SECRET, params=params(prompt_logprobs=1))
    # With its report it would be larger than all that is kept.
    score(world, large, 30_000)
    world.hand_over.report(large, RoomReserved("decode-0", 1))
    world.role.handle([KvPushed(large.engine_request.key, 100, "tcp")])
    assert PromptScored in {type(progress) for progress in await told(large)}
    for name in ("small", "large"):
        again = attach(world, name, 0)
        assert PromptScored not in {type(progress) for progress in await told(again)}
