"""Requests cancelled in every phase, by everybody: within a second no block is held anywhere."""

from typing import Any

import grpc

from tests.services.conftest import OVER_EACH_TRANSPORT, eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses


def ended(prefill: Any, outcome: str) -> float:
    count: float = prefill.metric("kaveri_prefill_requests_total", outcome=outcome)
    return count


@OVER_EACH_TRANSPORT
async def test_a_deadline_that_passes_while_prefilling(cluster: Any) -> None:
    prefill = await cluster.prefill(chunk_tokens=16, fake_step_s=0.5)
    await cluster.decode()
    router = await cluster.router()
    call = router.prefill(prefill, "a", prompt(6, 400), max_tokens=10, timeout_s=1.5)
    with refuses(grpc.StatusCode.DEADLINE_EXCEEDED):
        await call.ended()
    # Either the instance's own timer or the end of the call comes first.
    await eventually(lambda: ended(prefill, "deadline") + ended(prefill, "cancelled") == 1, "it is given up here too")
    await cluster.all_free()


async def test_a_router_that_stays_away_loses_its_requests_after_the_grace_and_no_other_does(cluster: Any) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(fake_step_s=0.01)
    gone, staying = await cluster.router("gone"), await cluster.router("staying")
    lost = gone.prefill(prefill, "lost", prompt(7, 60), max_tokens=400)
    kept = staying.prefill(prefill, "kept", prompt(8, 60), max_tokens=100)
    await lost.ended()
    await eventually(lambda: ("lost", 1) in gone.tokens, "it decodes")
    await decode.reserve("reserved", 40, router_id="gone")
    gone.unsubscribe(decode)
    assert await staying.answer(kept, "kept") == cluster.expected(prompt(8, 60), 100)
    await cluster.all_free()
    assert not gone.finished("lost")
    assert decode.metric("kaveri_decode_requests_total", outcome="finished") == 1
    assert decode.metric("kaveri_decode_requests_total", outcome="router_gone") == 2
