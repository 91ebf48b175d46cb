"""Permission to abort requests at a decode instance, and notice of the end to their routers."""

from typing import Any

import pytest

from kaveri.domain.owner import Term
from kaveri.engine.contract import KvPushed
from tests.services.conftest import eventually
from tests.services.prompts import prompt


@pytest.fixture
def begin(cluster: Any) -> Any:
    async def begin(max_tokens: int = 400, attempt: int = 1) -> Any:
        """Start a request that decodes. Returns its prefill and decode instances, its router and its call."""
        prefill, decode = await cluster.prefill(), await cluster.decode(fake_step_s=0.01)
        router = await cluster.router()
        call = router.prefill(prefill, "a", prompt(5, 60), max_tokens=max_tokens, attempt=attempt)
        await call.ended()
        await eventually(lambda: ("a", attempt) in router.tokens, "it decodes")
        return prefill, decode, router, call

    return begin


async def test_a_router_hears_when_prefill_gives_up_what_runs_already(cluster: Any) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode(fake_step_s=0.01)
    router = await cluster.router()
    # Prefill does not hear of the acceptance in time, and then its stream to the router breaks.
    handle = prefill.service.handle
    prefill.service.handle = lambda events: handle([event for event in events if not isinstance(event, KvPushed)])
    call = router.prefill(prefill, "a", prompt(5, 60), max_tokens=400)
    await eventually(lambda: ("a", 1) in router.tokens, "it decodes")
    assert not call.seen("handed_over")
    await call.cancel()
    await eventually(lambda: router.finished("a"), "the router hears of it")
    assert "prefill" in router.last["a", 1].error
    await cluster.all_free()


async def test_a_router_hears_nothing_of_what_it_aborts_itself(cluster: Any, begin: Any) -> None:
    prefill, decode, router, _ = await begin()
    await decode.abort("a")
    again = router.prefill(prefill, "a", prompt(6, 60), max_tokens=10, attempt=2)
    assert len(await router.answer(again, "a", 2)) == 10
    assert ("a", 1) not in router.last


@pytest.mark.parametrize("newer", [Term(0, 2), Term(1, 1)])
async def test_a_router_hears_when_its_request_is_lost_to_a_newer_owner_elsewhere(
    cluster: Any, begin: Any, newer: Term
) -> None:
    """Otherwise the router would wait for tokens forever if it were the newest owner after all."""
    _, decode, router, _ = await begin()
    (request,) = decode.service.landed()
    decode.service.lose(request, request.ownership.term.stale("a", newer))
    await eventually(lambda: router.finished("a"), "the router hears of it")
    assert router.last["a", 1].error
    # Another session has it: then this router must not place it again.
    assert router.last["a", 1].replaced == (newer.session > 0)
    await cluster.all_free()


@pytest.mark.parametrize(("attempt", "router_id"), [(1, "router-0"), (9, "router-1")])
async def test_an_abort_of_an_older_attempt_or_of_another_routers_request_ends_nothing(
    cluster: Any, begin: Any, attempt: int, router_id: str
) -> None:
    _, decode, router, call = await begin(max_tokens=40, attempt=2)
    await decode.abort("a", attempt, router_id)
    assert len(await router.answer(call, "a", 2)) == 40


async def test_a_request_that_another_router_begins_ends_the_former_at_once(cluster: Any) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode(fake_step_s=0.01)
    former, later = await cluster.router("former"), await cluster.router("later")
    first = former.prefill(prefill, "a", prompt(5, 60), max_tokens=400, attempt=7)
    await first.ended()
    await eventually(lambda: ("a", 7) in former.tokens, "it decodes")
    second = later.prefill(prefill, "a", prompt(6, 60), max_tokens=20)
    assert await later.answer(second, "a") == cluster.expected(prompt(6, 60), 20)
    await eventually(lambda: former.finished("a", 7), "the former router hears of it")
    assert former.last["a", 7].replaced
    await cluster.all_free()
